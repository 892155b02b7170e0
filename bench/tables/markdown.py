"""Tables in Markdown."""


def rows(head, body):
    """A table."""
    first, *others = ("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in [head, *body])
    return first + "|---" * len(head) + "|\n" + "".join(others)


def under(text, head, body):
    """A table under a paragraph."""
    return f"{text}\n\n{rows(head, body)}"
