"""The command line: a module per group of commands, and what they share: context, output, progress; the demo."""
