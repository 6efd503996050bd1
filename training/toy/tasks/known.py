"""Well-known single functions (factorial, palindrome, ...), asked for by name.

Knows: each one's wordings, its one answer and a reference. Must not know: pipelines, splits.
Every row holds no combination, so all of them belong to training.
"""
# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

FRAMES = (
    "Write a function that {t}.", "Write a Python function that {t}.", "I need a function that {t}.", "Can you write a function that {t}?",
    "Please write a Python function that {t}.", "Give me code that {t}.", "Could you show me a function that {t}?", "Python function that {t}.",
    "Create a function that {t}.", "I want a Python function that {t}.", "Help me write a function that {t}.", "Show me Python code that {t}.",
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """One function; `inputs` names the kind of each argument, `wordings` follow "a function that"."""

    name: str
    wordings: tuple[str, ...]
    header: str
    doc: str
    body: str
    closing: str
    inputs: tuple[str, ...]
    apply: Callable[..., Any]

    def answer(self) -> str:
        body = "\n".join("    " + line for line in self.body.split("\n"))
        return f'```python\ndef {self.header}:\n    """{self.doc}"""\n{body}\n```\n{self.closing}'


def _fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def _factorial(n: int) -> int:
    product = 1
    for factor in range(2, n + 1):
        product *= factor
    return product


def _collatz(n: int) -> int:
    steps = 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def _prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, n))


def _fizz(k: int) -> str:
    return ("Fizz" * (k % 3 == 0) + "Buzz" * (k % 5 == 0)) or str(k)


KNOWN = (
    Known("factorial", ("computes the factorial of n", "returns the factorial of a number", "calculates n factorial", "returns n!"),
          "factorial(n)", "Return the factorial of n.",
          "result = 1\nfor factor in range(2, n + 1):\n    # Multiply by every number up to n.\n    result *= factor\nreturn result",
          "The function multiplies all the numbers from 1 to n. The factorial of 0 is 1.", ("n",), _factorial),
    Known("fibonacci", ("returns the nth Fibonacci number", "computes the n-th Fibonacci number", "calculates Fibonacci numbers", "returns Fibonacci number n"),
          "fibonacci(n)", "Return the Fibonacci number with index n.",
          "first, second = 0, 1\nfor _ in range(n):\n    # Move one step along the sequence.\n    first, second = second, first + second\nreturn first",
          "The function starts with 0 and 1 and moves n steps along the sequence.", ("n",), _fibonacci),
    Known("fibonacci_list", ("returns the first n Fibonacci numbers", "lists the first n Fibonacci numbers", "returns a list of n Fibonacci numbers"),
          "fibonacci_list(n)", "Return the first n Fibonacci numbers.",
          "result = []\nfirst, second = 0, 1\nfor _ in range(n):\n    # Keep the number and move one step.\n    result.append(first)\n    first, second = second, first + second\nreturn result",
          "The function collects n numbers, starting with 0 and 1.", ("n",), lambda n: [_fibonacci(k) for k in range(n)]),
    Known("is_prime", ("checks if a number is prime", "tells whether n is a prime number", "returns whether a number is prime", "tests if n is prime"),
          "is_prime(n)", "Return whether n is a prime number.",
          "if n < 2:\n    return False\nfor divisor in range(2, n):\n    # A prime has no divisor but 1 and itself.\n    if n % divisor == 0:\n        return False\nreturn True",
          "The function tries every divisor from 2 to n - 1. Numbers below 2 are not prime.", ("n",), _prime),
    Known("primes", ("returns all primes up to n", "lists the prime numbers up to n", "finds all prime numbers from 2 to n"),
          "primes_up_to(n)", "Return the prime numbers up to n.",
          "result = []\nfor number in range(2, n + 1):\n    # Keep the number when no smaller prime divides it.\n    if all(number % prime != 0 for prime in result):\n        result.append(number)\nreturn result",
          "The function keeps every number that no smaller prime divides.", ("n",), lambda n: [k for k in range(2, n + 1) if _prime(k)]),
    Known("gcd", ("computes the greatest common divisor of two numbers", "returns the gcd of a and b", "finds the greatest common divisor of a and b"),
          "gcd(a, b)", "Return the greatest common divisor of a and b.",
          "while b != 0:\n    # Replace the pair by the smaller number and the remainder.\n    a, b = b, a % b\nreturn a",
          "The function follows Euclid: it takes remainders until nothing is left over.", ("n", "n"), gcd),
    Known("lcm", ("computes the least common multiple of two numbers", "returns the lcm of a and b", "finds the least common multiple of a and b"),
          "lcm(a, b)", "Return the least common multiple of a and b.",
          "multiple = a\nwhile b != 0 and multiple % b != 0:\n    # Try the next multiple of a.\n    multiple += a\nreturn multiple if b != 0 else 0",
          "The function tries the multiples of a until b divides one of them.", ("n", "n"), lambda a, b: a * b // gcd(a, b) if a and b else 0),
    Known("palindrome", ("checks if a string is a palindrome", "tells whether a word is a palindrome", "returns whether a text reads the same backwards"),
          "is_palindrome(text)", "Return whether the text reads the same backwards.",
          "# Compare the text with its reverse.\nreturn text == text[::-1]",
          "The function compares the text with its reverse. An empty text is a palindrome.", ("text",), lambda t: t == t[::-1]),
    Known("reverse_string", ("reverses a string", "returns a string backwards", "turns a text around"),
          "reverse_string(text)", "Return the text backwards.", "# A slice with step -1 runs from the end to the start.\nreturn text[::-1]",
          "The function returns the characters from the last to the first.", ("text",), lambda t: t[::-1]),
    Known("count_vowels", ("counts the vowels in a string", "returns the number of vowels in a text", "counts how many vowels a text has"),
          "count_vowels(text)", "Return the number of vowels in the text.",
          'count = 0\nfor character in text.lower():\n    # Count every a, e, i, o and u.\n    if character in "aeiou":\n        count += 1\nreturn count',
          "The function counts a, e, i, o and u, in upper case and in lower case.", ("text",), lambda t: sum(c in "aeiou" for c in t.lower())),
    Known("count_words", ("counts the words in a text", "returns the number of words in a sentence", "counts how many words a string has"),
          "count_words(text)", "Return the number of words in the text.", "# Words are separated by spaces.\nreturn len(text.split())",
          "The function splits the text at spaces and counts the parts.", ("text",), lambda t: len(t.split())),
    Known("digit_sum", ("returns the sum of the digits of a number", "adds up the digits of n", "computes the digit sum of a number"),
          "digit_sum(n)", "Return the sum of the digits of n.",
          "total = 0\nwhile n > 0:\n    # Add the last digit and remove it.\n    total += n % 10\n    n = n // 10\nreturn total",
          "The function adds the last digit and removes it until nothing is left.", ("big",), lambda n: sum(map(int, str(n)))),
    Known("count_digits", ("counts the digits of a number", "returns how many digits n has", "returns the number of digits of a number"),
          "count_digits(n)", "Return the number of digits of n.", "# Write the number as text and count.\nreturn len(str(n))",
          "The function writes the number as text and counts its characters.", ("big",), lambda n: len(str(n))),
    Known("to_fahrenheit", ("converts Celsius to Fahrenheit", "turns a temperature from Celsius into Fahrenheit", "converts degrees Celsius to Fahrenheit"),
          "to_fahrenheit(celsius)", "Convert degrees Celsius to degrees Fahrenheit.",
          "# Scale by 9/5 and shift by 32.\nreturn celsius * 9 / 5 + 32", "The function multiplies by 9, divides by 5 and adds 32.", ("any",), lambda c: c * 9 / 5 + 32),
    Known("to_celsius", ("converts Fahrenheit to Celsius", "turns a temperature from Fahrenheit into Celsius", "converts degrees Fahrenheit to Celsius"),
          "to_celsius(fahrenheit)", "Convert degrees Fahrenheit to degrees Celsius.",
          "# Shift by 32 and scale by 5/9.\nreturn (fahrenheit - 32) * 5 / 9", "The function subtracts 32, multiplies by 5 and divides by 9.", ("any",), lambda f: (f - 32) * 5 / 9),
    Known("fizzbuzz", ("plays FizzBuzz up to n", "returns the FizzBuzz list from 1 to n", "solves FizzBuzz for the numbers 1 to n"),
          "fizzbuzz(n)", "Return the FizzBuzz words from 1 to n.",
          'result = []\nfor number in range(1, n + 1):\n    if number % 15 == 0:\n        result.append("FizzBuzz")\n    elif number % 3 == 0:\n        result.append("Fizz")\n    elif number % 5 == 0:\n        result.append("Buzz")\n    else:\n        result.append(str(number))\nreturn result',
          "Multiples of 3 give Fizz, multiples of 5 give Buzz and multiples of both give FizzBuzz.", ("n",), lambda n: [_fizz(k) for k in range(1, n + 1)]),
    Known("anagram", ("checks if two strings are anagrams", "tells whether two words are anagrams", "returns whether two texts have the same letters"),
          "are_anagrams(first, second)", "Return whether both texts have the same letters.",
          "# Anagrams are equal once their letters are sorted.\nreturn sorted(first.lower()) == sorted(second.lower())",
          "The function sorts the letters of both texts and compares them.", ("text", "text"), lambda a, b: sorted(a.lower()) == sorted(b.lower())),
    Known("is_even", ("checks if a number is even", "tells whether n is even", "returns whether a number is even"),
          "is_even(n)", "Return whether n is even.", "# An even number leaves no remainder.\nreturn n % 2 == 0",
          "The function checks that dividing by 2 leaves no remainder.", ("any",), lambda n: n % 2 == 0),
    Known("is_odd", ("checks if a number is odd", "tells whether n is odd", "returns whether a number is odd"),
          "is_odd(n)", "Return whether n is odd.", "# An odd number leaves the remainder 1.\nreturn n % 2 == 1",
          "The function checks that dividing by 2 leaves the remainder 1.", ("any",), lambda n: n % 2 == 1),
    Known("leap_year", ("checks if a year is a leap year", "tells whether a year is a leap year", "returns whether a year has 366 days"),
          "is_leap_year(year)", "Return whether the year is a leap year.",
          "# Every fourth year, but only every fourth century.\nreturn year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
          "Years divisible by 4 are leap years, except centuries not divisible by 400.", ("big",), lambda y: y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)),
    Known("divisors", ("returns all divisors of a number", "lists the divisors of n", "finds every divisor of a number"),
          "divisors(n)", "Return the divisors of n.", "# Keep the numbers that divide n.\nreturn [number for number in range(1, n + 1) if n % number == 0]",
          "The function keeps every number from 1 to n that divides n.", ("n",), lambda n: [k for k in range(1, n + 1) if n % k == 0]),
    Known("prime_factors", ("returns the prime factors of a number", "factors n into primes", "finds the prime factorization of n"),
          "prime_factors(n)", "Return the prime factors of n.",
          "result = []\ndivisor = 2\nwhile n > 1:\n    # Divide as long as it goes, then try the next divisor.\n    if n % divisor == 0:\n        result.append(divisor)\n        n = n // divisor\n    else:\n        divisor += 1\nreturn result",
          "The function divides by 2 as long as it goes, then by 3, and so on.", ("n",), lambda n: _factors(n)),
    Known("collatz", ("counts the Collatz steps of n", "returns the number of Collatz steps from n to 1", "counts the steps of the Collatz sequence"),
          "collatz_steps(n)", "Return the number of Collatz steps from n to 1.",
          "steps = 0\nwhile n > 1:\n    # Halve an even number, else triple it and add one.\n    if n % 2 == 0:\n        n = n // 2\n    else:\n        n = 3 * n + 1\n    steps += 1\nreturn steps",
          "The function halves even numbers, and triples odd ones and adds one, until it reaches 1.", ("n",), _collatz),
    Known("power", ("raises a number to a power", "computes base to the power of exponent", "returns a number raised to an exponent"),
          "power(base, exponent)", "Return the base raised to the exponent.",
          "result = 1\nfor _ in range(exponent):\n    # Multiply once for each unit of the exponent.\n    result *= base\nreturn result",
          "The function multiplies by the base as often as the exponent says.", ("any", "n"), lambda b, e: b**e),
    Known("to_binary", ("converts a number to binary", "returns n in binary", "writes a number as a binary string"),
          "to_binary(n)", "Return n written in binary.",
          'digits = ""\nwhile n > 0:\n    # The remainder is the next digit from the right.\n    digits = str(n % 2) + digits\n    n = n // 2\nreturn digits or "0"',
          "The function collects the remainders of dividing by 2, from right to left.", ("n",), lambda n: f"{n:b}"),
    Known("larger", ("returns the larger of two numbers", "finds the maximum of two numbers", "returns the bigger of a and b"),
          "larger(a, b)", "Return the larger of a and b.", "# Compare the two numbers.\nif a > b:\n    return a\nreturn b",
          "The function compares both numbers. If they are equal, it returns that number.", ("any", "any"), max),
    Known("swap_case", ("swaps upper case and lower case", "swaps the case of each letter", "turns capital letters into small ones and small ones into capitals"),
          "swap_case(text)", "Return the text with upper case and lower case swapped.", "# Strings know how to swap their case.\nreturn text.swapcase()",
          "The function turns capital letters into small ones and the other way round.", ("text",), str.swapcase),
    Known("is_square", ("checks if a number is a perfect square", "tells whether n is a perfect square", "returns whether n is a square number"),
          "is_square(n)", "Return whether n is a perfect square.", "root = 0\nwhile root * root < n:\n    # Try the next root.\n    root += 1\nreturn root * root == n",
          "The function tries roots from 0 until the square reaches n.", ("n",), lambda n: round(n**0.5) ** 2 == n),
    Known("rectangle_area", ("computes the area of a rectangle", "returns the area of a rectangle", "calculates a rectangle's area"),
          "rectangle_area(width, height)", "Return the area of a rectangle.", "# The area is the product of both sides.\nreturn width * height",
          "The function multiplies the width by the height.", ("n", "n"), lambda a, b: a * b),
    Known("rectangle_perimeter", ("computes the perimeter of a rectangle", "returns the perimeter of a rectangle", "calculates a rectangle's perimeter"),
          "rectangle_perimeter(width, height)", "Return the perimeter of a rectangle.", "# Every side appears twice.\nreturn 2 * (width + height)",
          "The function adds the width and the height and doubles the sum.", ("n", "n"), lambda a, b: 2 * (a + b)),
)  # fmt: skip
KNOWN_BY_NAME = {row.name: row for row in KNOWN}


def _factors(n: int) -> list[int]:
    found, divisor = [], 2
    while n > 1:
        if n % divisor == 0:
            found.append(divisor)
            n //= divisor
        else:
            divisor += 1
    return found


def request(row: Known, rng: random.Random) -> str:
    """One of the ways to ask for it."""
    text = rng.choice(FRAMES).format(t=rng.choice(row.wordings))
    if rng.random() < 0.2 and not text.startswith(("I ", "Python")):
        text = text[:1].lower() + text[1:]
    return text.rstrip(".?") if rng.random() < 0.2 else text


def random_arguments(row: Known, rng: random.Random) -> list[Any]:
    """One set of arguments of the right kinds."""
    kinds = {"n": (0, 24), "big": (0, 3000), "any": (-20, 40)}
    return [
        "".join(rng.choices("abcdeimnorst AEI", k=rng.choice((0, 1, 3, 8))))
        if kind == "text"
        else rng.randint(*kinds[kind])
        for kind in row.inputs
    ]
