"""The daemon: a lake over HTTP. It holds no truth of its own; what it answered is in the catalog (I4)."""
