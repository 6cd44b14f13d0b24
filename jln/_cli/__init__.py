"""The command line: `app` has the table of commands, a file each; `console` is how all of them talk."""
