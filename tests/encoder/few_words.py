"""Documents of few words."""

TEXT = "the cat sat on a mat while small dogs were sleeping under tables and chairs"


def document(number: int) -> str:
    """Some words, in an order of its own."""
    words = TEXT.split()
    return " ".join(words[(number * k + k * k) % len(words)] for k in range(20 + number % 60))
