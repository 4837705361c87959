"""One operation per file: its formula and its plain-torch form."""
