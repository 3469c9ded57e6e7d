"""The daemon of `floodmark run`: its lifecycle, what its settings declare, and the tasks that it runs on schedule."""
