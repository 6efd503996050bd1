"""Operations on words, characters, dictionaries and records.

Knows: the same columns as `operations.py`, for the other types. Must not know: framing, drawing, splits.
"""
# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .operations import Operation

VOWELS = "aeiou"


def _words(
    name: str,
    group: str,
    phrasings: tuple[str, ...],
    test: str,
    part: str,
    apply: Callable[..., bool],
    arguments: str = "",
    before: str = "",
    after: str = "",
    kind: str = "word",
) -> Operation:
    """A filter on words, or on characters."""
    return Operation(
        name, (kind + "s",), kind + "s", group, phrasings,
        f"[{kind} for {kind} in {{v}} if {test}]", part,
        lambda values, *a: [x for x in values if apply(x, *a)], arguments, before, after,
    )  # fmt: skip


def _each(
    name: str,
    group: str,
    phrasings: tuple[str, ...],
    expression: str,
    part: str,
    apply: Callable[..., Any],
    arguments: str = "",
    noun: str = "",
    gives: str = "words",
    kind: str = "word",
) -> Operation:
    """A map over words, or over characters."""
    return Operation(
        name, (kind + "s",), gives, group, phrasings,
        f"[{expression} for {kind} in {{v}}]", part,
        lambda values, *a: [apply(x, *a) for x in values], arguments, "", "", noun,
    )  # fmt: skip


WORD_STEPS = (
    _words("longer_than", "length", ("keep the words longer than {0} letters", "keep the words longer than {0}",
           "keep words with more than {0} letters", "select the words longer than {0} letters",
           "keep only the words with more than {0} letters"),
           "len(word) > {0}", "long", lambda w, a: len(w) > a, "size", after="longer than {0} letters"),
    _words("shorter_than", "length", ("keep the words shorter than {0} letters", "keep the words shorter than {0}",
           "keep words with fewer than {0} letters", "select the words shorter than {0} letters",
           "keep only the words with fewer than {0} letters"),
           "len(word) < {0}", "short", lambda w, a: len(w) < a, "size", after="shorter than {0} letters"),
    _words("exactly_long", "length", ("keep the words with exactly {0} letters", "keep the words of {0} letters",
           "keep only the {0} letter words", "select the words with exactly {0} letters", "keep the words of length {0}"),
           "len(word) == {0}", "exact", lambda w, a: len(w) == a, "size", after="with exactly {0} letters"),
    _words("starting", "start", ("keep the words starting with {0}", "keep the words that start with {0}",
           "keep only words that begin with {0}", "select the words starting with the letter {0}",
           "keep the words beginning with {0}"),
           'word.startswith("{0}")', "starting", lambda w, a: w.startswith(a), "letter", after="starting with {0}"),
    _words("ending", "end", ("keep the words ending with {0}", "keep the words that end with {0}",
           "keep only words that end in {0}", "select the words ending with the letter {0}", "keep the words ending in {0}"),
           'word.endswith("{0}")', "ending", lambda w, a: w.endswith(a), "letter", after="ending with {0}"),
    _words("containing", "contain", ("keep the words containing {0}", "keep the words that contain {0}",
           "keep only words with the letter {0}", "select the words that contain the letter {0}", "keep the words with {0} in them"),
           '"{0}" in word', "matching", lambda w, a: a in w, "letter", after="containing {0}"),
    _words("lacking", "contain", ("drop the words containing {0}", "remove the words that contain {0}",
           "keep the words without the letter {0}", "remove the words containing the letter {0}", "drop words with the letter {0}"),
           '"{0}" not in word', "lacking", lambda w, a: a not in w, "letter", after="without the letter {0}"),
    _words("palindromes", "palindrome", ("keep the palindromes", "keep only the palindromes", "select the palindromes",
           "keep the words that read the same backwards", "keep the words that are palindromes"),
           "word == word[::-1]", "palindrome", lambda w: w == w[::-1]),
    _each("upper_words", "case", ("convert each word to upper case", "make each word upper case", "uppercase each word",
          "turn the words into upper case", "uppercase all the words", "put every word in capital letters"),
          "word.upper()", "uppercase", str.upper),
    _each("lower_words", "case", ("convert each word to lower case", "make each word lower case", "lowercase each word",
          "turn the words into lower case", "lowercase all the words", "put every word in small letters"),
          "word.lower()", "lowercase", str.lower),
    _each("capitalize", "case", ("capitalize each word", "capitalize every word", "capitalize them",
          "capitalize all the words"), "word.capitalize()", "capitalized", str.capitalize),
    _each("reverse_each", "flip", ("reverse the letters of each word", "reverse each word", "spell each word backwards",
          "write every word backwards", "reverse every word"), "word[::-1]", "mirrored", lambda w: w[::-1]),
    _each("repeat", "repeat", ("repeat each word {0} times", "repeat every word {0} times", "write each word {0} times in a row",
          "copy each word {0} times"), "word * {0}", "repeated", lambda w, a: w * a, "few"),
    _each("initials", "letter", ("take the first letter of each word", "take the first letters", "take the initial of each word",
          "get the first letter of every word", "pick the first letter of each word"),
          "word[:1]", "initials_of", lambda w: w[:1], noun="the first letters of"),
    _each("finals", "letter", ("take the last letter of each word", "take the last letters", "get the last letter of every word",
          "pick the last letter of each word"), "word[-1:]", "finals_of", lambda w: w[-1:], noun="the last letters of"),
    _each("suffix", "affix", ('add "{0}" to the end of each word', 'add "{0}" after each word', 'append "{0}" to each word',
          'put "{0}" at the end of every word'), 'word + "{0}"', "suffixed", lambda w, a: w + a, "mark"),
    _each("prefix", "affix", ('add "{0}" to the start of each word', 'add "{0}" before each word', 'put "{0}" in front of each word',
          'put "{0}" at the start of every word'), '"{0}" + word', "prefixed", lambda w, a: a + w, "mark"),
    _each("lengths", "lengths", ("take the length of each word", "get the length of each word", "compute the length of every word",
          "replace each word by its length", "count the letters of each word"),
          "len(word)", "lengths_of", len, noun="the lengths of", gives="numbers"),
    Operation("sort_words", ("words",), "words", "order", ("sort the words alphabetically", "sort the words",
              "sort them alphabetically", "put the words in alphabetical order", "sort them from a to z"),
              "sorted({v})", "sorted", sorted, after="in alphabetical order"),
    Operation("sort_words_down", ("words",), "words", "order", ("sort the words in reverse alphabetical order",
              "sort them in reverse alphabetical order", "sort the words from z to a", "sort them from z to a"),
              "sorted({v}, reverse=True)", "descending", lambda v: sorted(v, reverse=True), after="in reverse alphabetical order"),
    Operation("sort_by_length", ("words",), "words", "order", ("sort the words by length", "sort them by length",
              "order the words by length", "sort the words from shortest to longest"),
              "sorted({v}, key=len)", "ordered", lambda v: sorted(v, key=len), after="sorted by length"),
)  # fmt: skip

CHARACTER_STEPS = (
    _words("vowels", "letters", ("keep the vowels", "keep only the vowels", "select the vowels", "take the vowels", "pick out the vowels"),
           'character.lower() in "aeiou"', "vowel", lambda c: c.lower() in VOWELS, kind="character"),
    _words("no_vowels", "letters", ("remove the vowels", "drop the vowels", "remove all vowels", "delete the vowels", "take out the vowels"),
           'character.lower() not in "aeiou"', "vowelless", lambda c: c.lower() not in VOWELS, kind="character"),
    _words("digits", "letters", ("keep the digits", "keep only the digits", "select the digits", "pick out the digits", "take only the digits"),
           "character.isdigit()", "digit", str.isdigit, kind="character"),
    _words("no_digits", "letters", ("remove the digits", "drop the digits", "remove all digits", "delete the digits", "take out the digits"),
           "not character.isdigit()", "digitless", lambda c: not c.isdigit(), kind="character"),
    _words("letters", "letters", ("keep the letters", "keep only the letters", "select the letters", "remove everything that is not a letter",
           "keep only alphabetic characters"), "character.isalpha()", "letter", str.isalpha, kind="character"),
    _words("no_spaces", "spaces", ("remove the spaces", "drop the spaces", "remove all spaces", "delete the spaces", "strip out the spaces"),
           'character != " "', "spaceless", lambda c: c != " ", kind="character"),
    _words("no_letter", "one letter", ("remove every {0}", "remove the letter {0}", "delete every {0}", "drop the letter {0}", "take out every {0}"),
           'character != "{0}"', "lacking", lambda c, a: c != a, "letter", kind="character"),
    _words("uppercase_only", "case kept", ("keep the capital letters", "keep only the capital letters", "keep the uppercase letters",
           "select the uppercase letters", "pick out the capital letters"),
           "character.isupper()", "capital", str.isupper, kind="character"),
    _each("upper_characters", "case", ("convert each character to upper case", "make each character upper case", "uppercase the text",
          "turn the text into upper case", "make everything upper case"),
          "character.upper()", "uppercase", str.upper, gives="characters", kind="character"),
    _each("lower_characters", "case", ("convert each character to lower case", "make each character lower case", "lowercase the text",
          "turn the text into lower case", "make everything lower case"),
          "character.lower()", "lowercase", str.lower, gives="characters", kind="character"),
    _each("repeat_characters", "repeat", ("repeat each character {0} times", "repeat every character {0} times",
          "write each character {0} times", "copy each character {0} times"),
          "character * {0}", "repeated", lambda c, a: c * a, "few", gives="characters", kind="character"),
    Operation("digit_values", ("characters",), "numbers", "letters", ("read the digits as numbers", "turn the digits into numbers",
              "take the digits as numbers", "convert the digits to numbers"),
              "[int(character) for character in {v} if character.isdigit()]", "digits_of", lambda v: [int(c) for c in v if c.isdigit()]),
    Operation("sort_characters", ("characters",), "characters", "order", ("sort the characters", "sort them", "put the characters in order",
              "sort all the characters", "order the characters"), "sorted({v})", "sorted", sorted),
)  # fmt: skip


def _pairs(
    name: str,
    group: str,
    phrasings: tuple[str, ...],
    body: str,
    part: str,
    apply: Callable[..., Any],
    arguments: str = "",
) -> Operation:
    """A step from a dictionary to a dictionary; `body` is the comprehension without its braces."""
    return Operation(name, ("pairs",), "pairs", group, phrasings, "{{" + body + "}}", part, apply, arguments)


PAIR_STEPS = (
    _pairs("value_above", "lower bound", ("keep the entries with a value greater than {0}", "keep the entries with values above {0}",
           "keep the entries whose value is greater than {0}", "select the entries with a value over {0}"),
           "name: value for name, value in {v}.items() if value > {0}", "large", lambda d, a: {k: v for k, v in d.items() if v > a}, "threshold"),
    _pairs("value_below", "upper bound", ("keep the entries with a value smaller than {0}", "keep the entries with values below {0}",
           "keep the entries whose value is less than {0}", "select the entries with a value under {0}"),
           "name: value for name, value in {v}.items() if value < {0}", "small", lambda d, a: {k: v for k, v in d.items() if v < a}, "threshold"),
    _pairs("even_values", "parity", ("keep the entries with an even value", "keep the entries with even values",
           "keep the entries whose value is even", "select the entries with an even value"),
           "name: value for name, value in {v}.items() if value % 2 == 0", "even", lambda d: {k: v for k, v in d.items() if v % 2 == 0}),
    _pairs("name_starting", "start", ("keep the entries with a name starting with {0}", "keep the names that start with {0}",
           "keep the entries whose name starts with {0}", "select the names starting with {0}"),
           'name: value for name, value in {v}.items() if name.startswith("{0}")', "starting",
           lambda d, a: {k: v for k, v in d.items() if k.startswith(a)}, "capital"),
    _pairs("name_longer", "length", ("keep the entries with a name longer than {0} letters", "keep the names longer than {0} letters",
           "keep the entries whose name has more than {0} letters", "select the names longer than {0} letters"),
           "name: value for name, value in {v}.items() if len(name) > {0}", "long", lambda d, a: {k: v for k, v in d.items() if len(k) > a}, "size"),
    _pairs("add_values", "shift", ("add {0} to each value", "add {0} to every value", "increase each value by {0}", "increase all the values by {0}"),
           "name: value + {0} for name, value in {v}.items()", "increased", lambda d, a: {k: v + a for k, v in d.items()}, "amount"),
    _pairs("subtract_values", "shift", ("subtract {0} from each value", "subtract {0} from every value", "decrease each value by {0}", "take {0} off each value"),
           "name: value - {0} for name, value in {v}.items()", "decreased", lambda d, a: {k: v - a for k, v in d.items()}, "amount"),
    _pairs("double_values", "scale", ("double each value", "double every value", "double all the values", "double the values"),
           "name: value * 2 for name, value in {v}.items()", "doubled", lambda d: {k: v * 2 for k, v in d.items()}),
    _pairs("upper_names", "case", ("convert each name to upper case", "uppercase the names", "make each name upper case", "uppercase every name"),
           "name.upper(): value for name, value in {v}.items()", "uppercase", lambda d: {k.upper(): v for k, v in d.items()}),
    Operation("take_values", ("pairs",), "numbers", "take", ("take the values", "get the values", "collect the values", "take only the values"),
              "list({v}.values())", "values_of", lambda d: list(d.values())),
    Operation("take_names", ("pairs",), "words", "take", ("take the names", "get the names", "collect the names", "take only the names"),
              "list({v}.keys())", "names_of", lambda d: list(d)),
)  # fmt: skip

RECORD_STEPS = (
    Operation("field_above", ("records",), "records", "lower bound", ("keep the {items} with {0} greater than {1}", "keep the {items} with {0} above {1}",
              "keep the {items} whose {0} is greater than {1}", "select the {items} whose {0} is over {1}"),
              '[{item} for {item} in {v} if {item}["{0}"] > {1}]', "high", lambda v, f, a: [r for r in v if r[f] > a], "field number",
              after="with {0} greater than {1}"),
    Operation("field_below", ("records",), "records", "upper bound", ("keep the {items} with {0} smaller than {1}", "keep the {items} with {0} below {1}",
              "keep the {items} whose {0} is less than {1}", "select the {items} whose {0} is under {1}"),
              '[{item} for {item} in {v} if {item}["{0}"] < {1}]', "low", lambda v, f, a: [r for r in v if r[f] < a], "field number",
              after="with {0} smaller than {1}"),
    Operation("field_equals", ("records",), "records", "equals", ("keep the {items} with {0} equal to {1}", "keep the {items} whose {0} is {1}",
              "keep only the {items} with {0} {1}", "select the {items} whose {0} is {1}"),
              '[{item} for {item} in {v} if {item}["{0}"] == "{1}"]', "matching", lambda v, f, a: [r for r in v if r[f] == a], "field text",
              after="with {0} equal to {1}"),
    Operation("sort_by", ("records",), "records", "order", ("sort the {items} by {0}", "sort them by {0}", "order the {items} by {0}",
              "sort the {items} by {0} from smallest to largest", "sort them by {0} in ascending order"),
              'sorted({v}, key=lambda {item}: {item}["{0}"])', "sorted", lambda v, f: sorted(v, key=lambda r: r[f]), "field", after="sorted by {0}"),
    Operation("sort_by_down", ("records",), "records", "order", ("sort the {items} by {0} in descending order", "sort them by {0} in descending order",
              "order the {items} by {0} from largest to smallest", "sort the {items} by {0} from largest to smallest"),
              'sorted({v}, key=lambda {item}: {item}["{0}"], reverse=True)', "descending",
              lambda v, f: sorted(v, key=lambda r: r[f], reverse=True), "field", after="sorted by {0} in descending order"),
    Operation("take_field", ("records",), "numbers", "take", ("take the {0} of each {item}", "get the {0} of each {item}", "collect the {0} of every {item}",
              "pick the {0} of each {item}"), '[{item}["{0}"] for {item} in {v}]', "{0}_of", lambda v, f: [r[f] for r in v], "field"),
    Operation("take_label", ("records",), "words", "take", ("take the {label} of each {item}", "get the {label} of each {item}",
              "collect the {label} of every {item}", "pick the {label} of each {item}"),
              '[{item}["{label}"] for {item} in {v}]', "{label}s_of", lambda v: [next(iter(r.values())) for r in v], noun="the {label}s of"),
)  # fmt: skip
