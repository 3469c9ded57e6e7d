import java.io.IOException;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.stream.Collectors;
import java.util.stream.StreamSupport;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.BaseTable;
import org.apache.iceberg.CatalogProperties;
import org.apache.iceberg.DataFile;
import org.apache.iceberg.DataFiles;
import org.apache.iceberg.FileFormat;
import org.apache.iceberg.FileScanTask;
import org.apache.iceberg.MetricsConfig;
import org.apache.iceberg.PartitionSpec;
import org.apache.iceberg.RewriteFiles;
import org.apache.iceberg.Snapshot;
import org.apache.iceberg.StaticTableOperations;
import org.apache.iceberg.Table;
import org.apache.iceberg.TableMetadata;
import org.apache.iceberg.TableMetadataParser;
import org.apache.iceberg.catalog.TableIdentifier;
import org.apache.iceberg.data.IcebergGenerics;
import org.apache.iceberg.data.Record;
import org.apache.iceberg.data.parquet.GenericParquetWriter;
import org.apache.iceberg.hadoop.HadoopFileIO;
import org.apache.iceberg.io.CloseableIterable;
import org.apache.iceberg.io.DataWriter;
import org.apache.iceberg.jdbc.JdbcCatalog;
import org.apache.iceberg.parquet.Parquet;
import org.apache.iceberg.types.Types;
import org.apache.iceberg.util.JsonUtil;

/**
 * Official Iceberg Java on our tables, one command a process; tests/interop/iceberg_java.py runs it.
 *
 * <p>describe and rows read a metadata file. The others commit through Iceberg's own JDBC catalog, as another engine
 * would: expire, rewrite-manifests, rewrite-data, append, set. The answer is one JSON object on stdout; an exception of
 * Iceberg is an answer too.
 */
public class IcebergProbe {
  public static void main(String[] args) throws Exception {
    Map<String, Object> answer = new LinkedHashMap<>();
    try {
      switch (args[0]) {
        case "describe" -> describe(args[1], answer);
        case "rows" -> rows(args[1], answer);
        default -> commit(args, answer);
      }
    } catch (RuntimeException error) {
      answer.put("error", error.getClass().getSimpleName());
      answer.put("message", String.valueOf(error.getMessage()));
    }
    System.out.println(JsonUtil.mapper().writeValueAsString(answer));
  }

  private static HadoopFileIO io() {
    return new HadoopFileIO(new Configuration());
  }

  private static void describe(String location, Map<String, Object> answer) {
    TableMetadata metadata = TableMetadataParser.read(io(), location);
    answer.put("uuid", metadata.uuid());
    answer.put("last_updated_ms", metadata.lastUpdatedMillis());
    answer.put("last_sequence", metadata.lastSequenceNumber());
    answer.put("properties", metadata.properties());
    answer.put(
        "snapshots",
        metadata.snapshots().stream()
            .map(
                one ->
                    Map.of(
                        "id", one.snapshotId(),
                        "sequence", one.sequenceNumber(),
                        "timestamp_ms", one.timestampMillis(),
                        "operation", String.valueOf(one.operation())))
            .collect(Collectors.toList()));
  }

  private static void rows(String location, Map<String, Object> answer) throws IOException {
    Table table = new BaseTable(new StaticTableOperations(location, io()), location);
    List<String> names =
        table.schema().columns().stream().map(Types.NestedField::name).collect(Collectors.toList());
    try (CloseableIterable<Record> found = IcebergGenerics.read(table).build()) {
      answer.put(
          "rows",
          StreamSupport.stream(found.spliterator(), false)
              .map(
                  record -> {
                    Map<String, Object> row = new LinkedHashMap<>();
                    for (String name : names) {
                      Object value = record.getField(name);
                      boolean plain = value == null || value instanceof Number || value instanceof Boolean;
                      row.put(name, plain ? value : String.valueOf(value));
                    }
                    return row;
                  })
              .collect(Collectors.toList()));
    }
  }

  /** COMMAND JDBC-URL CATALOG WAREHOUSE TABLE [argument…] */
  private static void commit(String[] args, Map<String, Object> answer) throws Exception {
    try (JdbcCatalog catalog = new JdbcCatalog()) {
      catalog.setConf(new Configuration());
      catalog.initialize(
          args[2],
          Map.of(
              CatalogProperties.URI, args[1],
              CatalogProperties.WAREHOUSE_LOCATION, args[3],
              CatalogProperties.FILE_IO_IMPL, HadoopFileIO.class.getName()));
      Table table = catalog.loadTable(TableIdentifier.parse(args[4]));
      switch (args[0]) {
        case "expire" ->
            table.expireSnapshots().expireOlderThan(System.currentTimeMillis()).retainLast(1).commit();
        case "rewrite-manifests" -> table.rewriteManifests().clusterBy(file -> "one").commit();
        case "rewrite-data" -> rewriteData(table, Boolean.parseBoolean(args[5]));
        case "set" -> table.updateProperties().set(args[5], args[6]).commit();
        default -> throw new IllegalArgumentException("no such command: " + args[0]);
      }
      table.refresh();
      Snapshot current = table.currentSnapshot();
      answer.put("operation", current == null ? "" : current.operation());
      answer.put("properties", table.properties());
    }
  }

  /** Every data file of an unpartitioned table into one; by its own sequence, or by the one of the start. */
  private static void rewriteData(Table table, boolean startingSequence) throws IOException {
    Set<DataFile> before = new HashSet<>();
    try (CloseableIterable<FileScanTask> tasks = table.newScan().planFiles()) {
      tasks.forEach(task -> before.add(task.file()));
    }
    String location = table.location() + "/data/" + UUID.randomUUID() + ".parquet";
    DataWriter<Record> writer =
        Parquet.writeData(table.io().newOutputFile(location))
            .schema(table.schema())
            .withSpec(PartitionSpec.unpartitioned())
            .createWriterFunc(GenericParquetWriter::create)
            .metricsConfig(MetricsConfig.forTable(table))
            .overwrite()
            .build();
    try (CloseableIterable<Record> rows = IcebergGenerics.read(table).build()) {
      rows.forEach(writer::write);
    } finally {
      writer.close();
    }
    RewriteFiles rewrite = table.newRewrite();
    before.forEach(rewrite::deleteFile);
    rewrite.addFile(writer.toDataFile());
    if (startingSequence) {
      rewrite.dataSequenceNumber(table.currentSnapshot().sequenceNumber());
    }
    rewrite.validateFromSnapshot(table.currentSnapshot().snapshotId()).commit();
  }
}
