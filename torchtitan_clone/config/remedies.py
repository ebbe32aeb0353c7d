"""Values near the one that breaks a rule, for the remedy in an error."""

import math


def nearest_divisors(number: int, target: int) -> list[int]:
    """The up to four divisors of `number` that are nearest to `target`, smallest first."""
    divisors = [count for count in range(1, number + 1) if number % count == 0]
    return sorted(sorted(divisors, key=lambda count: abs(math.log(count / target)))[:4])


def nearest_multiples(number: int, target: int) -> list[int]:
    """The multiples of `number` just below and just above `target`, above 0."""
    below = target // number * number
    return [count for count in (below, below + number) if count > 0]


def either(numbers: list[int]) -> str:
    """Returns the numbers as \"1, 2 or 3\"."""
    *head, last = map(str, numbers)
    return f"{', '.join(head)} or {last}" if head else last
