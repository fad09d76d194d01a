"""The commands, a module each: EXAMPLE, add_arguments(parser), run(args) -> exit status. Docstrings are the help."""
