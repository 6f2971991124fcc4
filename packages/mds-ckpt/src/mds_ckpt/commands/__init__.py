"""Parts of the command line: the parser, what a conversion prints, the old names of commands."""
