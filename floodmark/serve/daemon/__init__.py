"""The daemon of `floodmark run`: its life, what its settings declare, and the tasks that it runs on schedule."""
