"""The last operation of a pipeline: what the function returns.

Knows: every result for every type, how it is asked for and what it is when nothing is left.
Must not know: framing, drawing, splits.
"""
# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from .operations import SEQUENCES, Operation


def _extreme(records: Any, field: str, pick: Any) -> str:
    """The label (first field) of the first record with the extreme field."""
    return next(iter(pick(records, key=lambda r: r[field]).values())) if records else ""


RESULTS = (
    Operation("items", (*SEQUENCES, "records"), "value", "result", ("return the list", "return the resulting list", "return the {items}",
              "return the result", "return what is left"), "{v}", "list", lambda v: v, noun="{x}", ordered=True, empty="an empty list"),
    Operation("count", (*SEQUENCES, "records"), "value", "result", ("return the count", "return how many {items} there are",
              "count the {items}", "count what is left", "return how many are left"),
              "len({v})", "count", len, noun="the number of {x}", empty="0"),
    Operation("sum", ("numbers",), "value", "result", ("return the sum", "return their sum", "add them up", "return the total", "sum them up"),
              "sum({v})", "sum", sum, noun="the sum of {x}", empty="0"),
    Operation("product", ("numbers",), "value", "result", ("return the product", "return their product", "return the product of all of them",
              "multiply them all together"), "product = 1\nfor number in {v}:\n    product *= number\nreturn product", "product", prod, noun="the product of {x}", empty="1"),
    Operation("largest", ("numbers",), "value", "result", ("return the largest number", "return the maximum", "return the biggest one",
              "return the highest number", "return the largest one"), "max({v}, default=0)", "largest", lambda v: max(v, default=0),
              noun="the largest of {x}", empty="0"),
    Operation("smallest", ("numbers",), "value", "result", ("return the smallest number", "return the minimum", "return the lowest number",
              "return the smallest one"), "min({v}, default=0)", "smallest", lambda v: min(v, default=0), noun="the smallest of {x}", empty="0"),
    Operation("average", ("numbers",), "value", "result", ("return the average", "return the mean", "return their average", "compute the average",
              "return their mean"), "sum({v}) / len({v}) if {v} else 0", "average", lambda v: sum(v) / len(v) if v else 0,
              noun="the average of {x}", empty="0"),
    Operation("spread", ("numbers",), "value", "result", ("return the difference between the largest and the smallest", "return the spread",
              "return the largest minus the smallest", "return the maximum minus the minimum"),
              "max({v}) - min({v}) if {v} else 0", "spread", lambda v: max(v) - min(v) if v else 0,
              noun="the difference between the largest and the smallest of {x}", empty="0"),
    Operation("median", ("numbers",), "value", "result", ("return the upper median", "return the middle number in sorted order",
              "return the upper middle number in sorted order"), "sorted({v})[len({v}) // 2] if {v} else 0", "median",
              lambda v: sorted(v)[len(v) // 2] if v else 0, noun="the upper median of {x}", empty="0"),
    Operation("any_above", ("numbers",), "value", "result", ("return whether any number is greater than {0}", "check if any number is greater than {0}",
              "return true if any number is above {0}", "tell whether some number is larger than {0}"),
              "any(number > {0} for number in {v})", "any_large", lambda v, a: any(x > a for x in v), "threshold", empty="False"),
    Operation("all_below", ("numbers",), "value", "result", ("return whether all numbers are smaller than {0}", "check if all numbers are smaller than {0}",
              "return true if every number is below {0}", "tell whether every number is less than {0}"),
              "all(number < {0} for number in {v})", "all_small", lambda v, a: all(x < a for x in v), "threshold", empty="True"),
    Operation("contains", ("numbers",), "value", "result", ("return whether {0} is among them", "check if {0} is in the list",
              "return true if the list contains {0}", "tell whether {0} is one of them"),
              "{0} in {v}", "contains", lambda v, a: a in v, "threshold", empty="False"),
    Operation("running_totals", ("numbers",), "value", "result", ("return the running totals", "return the running sums", "return the cumulative sums",
              "compute the running totals"), "[sum({v}[:end]) for end in range(1, len({v}) + 1)]", "running",
              lambda v: [sum(v[:i]) for i in range(1, len(v) + 1)], noun="the running totals of {x}", ordered=True, empty="an empty list"),
    Operation("number_counts", ("numbers",), "value", "result", ("return how often each number occurs", "count how often each number occurs",
              "return a dictionary from each number to its count", "count each number in a dictionary"),
              "{{number: {v}.count(number) for number in {v}}}", "frequency", lambda v: dict(Counter(v)), empty="an empty dictionary"),
    Operation("first_item", ("numbers", "words"), "value", "result", ("return the first {item}", "return the first one", "return only the first {item}",
              "give back the first {item}"), "next(iter({v}), None)", "first", lambda v: v[0] if v else None, ordered=True, empty="None"),
    Operation("join_spaces", ("words",), "value", "result", ("join them with spaces", "return the words joined by spaces", "join the words with spaces",
              "return one string separated by spaces", "put them together with spaces"), '" ".join({v})', "joined", " ".join, ordered=True, empty="an empty string"),
    Operation("join_commas", ("words",), "value", "result", ("join them with commas", "return the words joined by commas", "join the words with commas",
              "return one string separated by commas"), '",".join({v})', "joined", ",".join, ordered=True, empty="an empty string"),
    Operation("join_hyphens", ("words",), "value", "result", ("join them with hyphens", "return the words joined by hyphens", "join the words with hyphens",
              "return one string separated by hyphens", "join them with dashes"), '"-".join({v})', "joined", "-".join, ordered=True, empty="an empty string"),
    Operation("longest", ("words",), "value", "result", ("return the longest word", "return the longest one", "find the longest word", "return the word with the most letters"),
              'max({v}, key=len, default="")', "longest", lambda v: max(v, key=len, default=""), noun="the longest of {x}", empty="an empty string"),
    Operation("shortest", ("words",), "value", "result", ("return the shortest word", "return the shortest one", "find the shortest word", "return the word with the fewest letters"),
              'min({v}, key=len, default="")', "shortest", lambda v: min(v, key=len, default=""), noun="the shortest of {x}", empty="an empty string"),
    Operation("total_length", ("words",), "value", "result", ("return the total number of letters", "return the total length", "return their total length",
              "count all the letters"), "sum(len(word) for word in {v})", "total", lambda v: sum(map(len, v)), noun="the total length of {x}", empty="0"),
    Operation("length_map", ("words",), "value", "result", ("return a dictionary from each word to its length", "map each word to its length",
              "return a dictionary with the length of each word", "make a dictionary of the word lengths"),
              "{{word: len(word) for word in {v}}}", "lengths", lambda v: {w: len(w) for w in v}, empty="an empty dictionary"),
    Operation("word_counts", ("words",), "value", "result", ("return how often each word occurs", "count how often each word occurs",
              "return a dictionary from each word to its count", "count each word in a dictionary"),
              "{{word: {v}.count(word) for word in {v}}}", "frequency", lambda v: dict(Counter(v)), empty="an empty dictionary"),
    Operation("any_longer", ("words",), "value", "result", ("return whether any word has more than {0} letters", "check if any word is longer than {0} letters",
              "return true if any word is longer than {0} letters", "tell whether some word has more than {0} letters"),
              "any(len(word) > {0} for word in {v})", "any_long", lambda v, a: any(len(w) > a for w in v), "size", empty="False"),
    Operation("join_text", ("characters",), "value", "result", ("join them into a string", "return the text", "return the result as a string",
              "put the characters back together", "return the new string"), '"".join({v})', "joined", "".join, ordered=True, empty="an empty string"),
    Operation("character_counts", ("characters",), "value", "result", ("return how often each character occurs", "count how often each character occurs",
              "return a dictionary from each character to its count", "count each character in a dictionary"),
              "{{character: {v}.count(character) for character in {v}}}", "frequency", lambda v: dict(Counter(v)), empty="an empty dictionary"),
    Operation("same_backwards", ("characters",), "value", "result", ("return whether they read the same backwards", "check if the result is a palindrome",
              "return true if they form a palindrome", "tell whether the result is a palindrome"),
              "{v} == {v}[::-1]", "palindrome", lambda v: v == v[::-1], ordered=True, empty="True"),
    Operation("entries", ("pairs",), "value", "result", ("return the dictionary", "return the resulting dictionary", "return the new dictionary",
              "return the result"), "{v}", "dictionary", lambda d: d, empty="an empty dictionary"),
    Operation("count_entries", ("pairs",), "value", "result", ("return the number of entries", "return how many entries there are", "count the entries",
              "return how many entries are left"), "len({v})", "count", len, empty="0"),
    Operation("top_name", ("pairs",), "value", "result", ("return the name with the largest value", "return the name with the highest value",
              "find the name with the largest value", "return whose value is the largest"),
              'max({v}, key={v}.get, default="")', "top", lambda d: max(d, key=d.get, default=""), empty="an empty string"),
    Operation("bottom_name", ("pairs",), "value", "result", ("return the name with the smallest value", "return the name with the lowest value",
              "find the name with the smallest value", "return whose value is the smallest"),
              'min({v}, key={v}.get, default="")', "bottom", lambda d: min(d, key=d.get, default=""), empty="an empty string"),
    Operation("swapped", ("pairs",), "value", "result", ("return a dictionary with names and values swapped", "swap the names and the values",
              "return the dictionary with names and values exchanged", "turn the dictionary around so that values point to names"),
              "{{value: name for name, value in {v}.items()}}", "swapped", lambda d: {v: k for k, v in d.items()}, empty="an empty dictionary"),
    Operation("top_record", ("records",), "value", "result", ("return the {label} of the {item} with the largest {0}", "return the {label} of the {item} with the highest {0}",
              "find the {label} of the {item} with the largest {0}", "return the {label} of the one with the largest {0}"),
              'max({v}, key=lambda {item}: {item}["{0}"])["{label}"] if {v} else ""', "top", lambda v, f: _extreme(v, f, max), "field", empty="an empty string"),
    Operation("bottom_record", ("records",), "value", "result", ("return the {label} of the {item} with the smallest {0}", "return the {label} of the {item} with the lowest {0}",
              "find the {label} of the {item} with the smallest {0}", "return the {label} of the one with the smallest {0}"),
              'min({v}, key=lambda {item}: {item}["{0}"])["{label}"] if {v} else ""', "bottom", lambda v, f: _extreme(v, f, min), "field", empty="an empty string"),
)  # fmt: skip


RESULT_BY_NAME = {row.name: row for row in RESULTS}
