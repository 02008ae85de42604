"""A reward that differs between any two responses of a small model: the share of vowels among the letters."""

VOWELS = "aeiouAEIOU"


def vowels(completions, **_):
    """Return from 0 to 1 for each completion, which is text or a conversation of one message."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    letters = [[c for c in text if c.isalpha()] for text in texts]
    return [sum(c in VOWELS for c in own) / max(len(own), 1) for own in letters]
