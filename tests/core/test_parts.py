"""A name with options is one text, read in one place; options that do not fit are one line that names what would."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refused

from dflash.core.errors import DFlashError, GenerationError
from dflash.core.parts import Part, check_options, make, with_options
from dflash.core.registry import Registry

KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
VALUES = st.one_of(
    st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(min_size=1).filter(lambda text: "=" not in text),
    st.lists(st.integers(), max_size=3), st.none(),
)  # fmt: skip


@settings(max_examples=40)
@given(st.from_regex(r"[a-z_+.-]{1,8}", fullmatch=True), st.dictionaries(KEYS, VALUES, max_size=4))
def test_what_is_written_is_read_again_whatever_the_values(name, options):
    assert Part.read(str(Part(name, options))) == Part(name, options)
    assert str(Part(name, options)) == str(Part(name, dict(reversed(options.items()))))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("typical", {}),
        ("typical:epsilon=0.1", {"epsilon": 0.1}),
        ("typical:epsilon=1e-4,most=4", {"epsilon": 1e-4, "most": 4}),
        ("typical: epsilon = .5 , soft=true", {"epsilon": 0.5, "soft": True}),
        ("typical:sizes=[4, 2],word=some text, and more", {"sizes": [4, 2], "word": "some text, and more"}),
        ("typical:none=null,path=a/b:c", {"none": None, "path": "a/b:c"}),
        ("typical:day=2024-01-01,odd=[1", {"day": "2024-01-01", "odd": "[1"}),
    ],
)
def test_values_are_json_or_yaml(text, options):
    assert Part.read(text) == Part("typical", options)
    assert Part.of({"name": "typical", "options": options}) == Part.of(text)


def test_what_json_lacks_is_written_as_text():
    assert str(Part.read("a:days=[2024-01-01]")) == 'a:days=["2024-01-01"]'


def test_a_number_in_quotes_is_text_and_one_that_yaml_takes_for_text_is_a_number():
    assert Part.read('typical:word="12"').options == {"word": "12"}
    assert Part.of({"name": "typical", "options": {"epsilon": "1e-4"}}).options == {"epsilon": 1e-4}


@pytest.mark.parametrize("text", ["a:", "a:0.1", "a:b=", "a:b=1,", "a:b=1,b=2", "a:=1", "a:2b=1", "a:b=1,,c=2"])
def test_options_in_another_form_are_one_line(text):
    with pytest.raises(DFlashError) as error:
        Part.read(text)
    refused(error, "expected a:key=value,key=value with each key once")


@pytest.mark.parametrize("given", [{}, {"name": 3}, {"name": "a", "option": {}}, {"name": "a", "options": [1]}])
def test_a_mapping_is_a_name_and_options(given):
    with pytest.raises(DFlashError) as error:
        Part.of(given)
    refused(error, "expected a name, or {name: NAME, options: {KEY: VALUE}}")


class Strict:
    def __init__(self, size: int, scale: float = 1.0):
        if size < 0:
            raise GenerationError("size must be at least 0.")
        self.size, self.scale = size + 0, scale

    def __call__(self, number: int) -> int:
        return self.size * number


@pytest.fixture
def rules():
    registry: Registry = Registry("rule", "dflash.tests")
    registry.register("strict")(Strict)
    registry.register("plus")(lambda number, more=1, times=1: (number + more) * times)
    registry.register("object")(Strict(3))
    registry.register("bare")(lambda number: number)
    registry.register("needs")(lambda number, most: number)
    registry.register("number")(3)
    return registry


def test_a_class_is_made_and_a_function_called_with_its_options(rules):
    made = make(rules, "strict:size=2,scale=3")
    assert (made.size, made.scale) == (2, 3)
    assert type(with_options(rules, "strict:size=2", 1)) is Strict
    assert with_options(rules, "plus", 1)(4) == 5
    assert with_options(rules, "plus:more=3,times=2", 1)(4) == 14
    assert with_options(rules, "object", 1) is rules.get("object")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nobody:a=1", "Unknown rule 'nobody'"),
        ("plus:mor=3", "The rule 'plus' has no option 'mor'; did you mean 'more'?"),
        ("plus:zzz=3", "The rule 'plus' has no option 'zzz'; known are more, times."),
        ("plus:number=3", "The rule 'plus' has no option 'number'"),
        ("bare:zzz=3", "The rule 'bare' has no option 'zzz'; it takes none."),
        ("strict", "The rule 'strict' needs a value for its option 'size'."),
        ("strict:size=abc", "The rule 'strict' cannot be made: TypeError: "),
        ("strict:size=-1", "size must be at least 0."),
        ("object:size=1", "The rule 'object' is an object and takes no options"),
        ("needs", "The rule 'needs' needs a value for its option 'most'."),
        ("number", "The rule 'number' is of type int; expected a class or a function."),
    ],
)
def test_options_that_do_not_fit_name_those_that_would(rules, text, words):
    with pytest.raises(DFlashError) as error:
        with_options(rules, text, 1)
    refused(error, words)


def test_an_object_makes_nothing(rules):
    with pytest.raises(DFlashError) as error:
        make(rules, "number")
    refused(error, "The rule 'number' is of type int; expected a class or a function.")


def test_what_has_no_signature_is_left_to_its_call():
    check_options("rule 'json'", json.JSONDecodeError, {}, 3)
    check_options("rule 'max'", max, {"key": len}, 1)
