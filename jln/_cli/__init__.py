"""The command line: `app` has the table of commands, each command a file; `console` prints for all of them."""
