"""Numbers in arguments, and lists: values with commas between them."""

import argparse


def names(text: str) -> list[str]:
    """`a,b` as ["a", "b"]."""
    return [name for name in text.split(",") if name]


def count(text: str) -> int:
    """A whole number from 1. Raises ArgumentTypeError for anything below, ValueError for no number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return number


def sizes(text: str) -> list[int]:
    """`8,1` as [1, 8]. Raises ArgumentTypeError for anything below 1, ValueError for no number."""
    numbers = sorted({int(number) for number in text.split(",")})
    if not numbers or numbers[0] < 1:
        raise argparse.ArgumentTypeError("sizes are whole numbers from 1")
    return numbers
