from floodmark.catalog.unit import *  # noqa: F403
from floodmark.catalog.unit import (  # noqa: F401
    ACKNOWLEDGED,
    ENCODER,
    QUARANTINED,
    RETRY,
    ROWS,
    SEALED,
    Part,
    Rules,
    Shipped,
    Stopped,
    Unit,
    UnitLog,
    Watch,
)
