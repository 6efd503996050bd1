"""The stories of the word problems: events, domains and their wordings, as tables.

Knows: what may happen to a quantity, how it is told, which numbers keep it exact and small.
Must not know: how a problem is drawn or solved, which pairs are held out.

Totals and products stay between 0 and 100, operands mostly between 2 and 20.
"""
# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LIMIT = 100
PRODUCT_LIMIT = 100


@dataclass(frozen=True)
class Event:
    """One kind of event.

    `tellings` are request sentences; the first, which says nothing that another leaves out, is the solution's. `move` says what is
    computed, over the total `t` and the numbers `a`, `b`: a list of (symbol, left, right) with "=" the
    previous result. `numbers` lists the pairs that are allowed at a total.
    """

    name: str
    tellings: tuple[str, ...]
    numbers: Callable[[int], list[tuple[int, int]]]
    sums: tuple[tuple[str, str, str], ...]
    now: str = "Now {lower} has {r}."


def _ones(low: int, high: int) -> list[tuple[int, int]]:
    return [(a, 0) for a in range(low, high + 1)]


def _gain(t: int) -> list[tuple[int, int]]:
    return _ones(2, min(20, LIMIT - t))


def _loss(t: int) -> list[tuple[int, int]]:
    return _ones(2, min(20, t - 2))


def _product_gain(t: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(2, 11) for b in range(2, 13) if a * b <= min(PRODUCT_LIMIT, LIMIT - t)]


def _product_loss(t: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(2, 11) for b in range(2, 13) if a * b <= t - 2]


def _double(t: int) -> list[tuple[int, int]]:
    return [(0, 0)] if 2 * t <= PRODUCT_LIMIT else []


def _triple(t: int) -> list[tuple[int, int]]:
    return [(0, 0)] if 3 * t <= PRODUCT_LIMIT else []


def _half(t: int) -> list[tuple[int, int]]:
    return [(0, 0)] if t % 2 == 0 and t >= 4 else []


def _third(t: int) -> list[tuple[int, int]]:
    return [(0, 0)] if t % 3 == 0 and t >= 6 else []


def _split(t: int) -> list[tuple[int, int]]:
    return [(a, 0) for a in range(2, 11) if t % a == 0 and t // a >= 2]


def _price(t: int) -> list[tuple[int, int]]:
    return [(a, 0) for a in range(2, 11) if t * a <= PRODUCT_LIMIT]


PLUS, MINUS, TIMES = "+", "-", "*"
GAIN, LOSS = (("+", "t", "a"),), (("-", "t", "a"),)
PACK_GAIN, PACK_LOSS = (("*", "a", "b"), ("+", "t", "=")), (("*", "a", "b"), ("-", "t", "="))
HALF_LOSS, THIRD_LOSS = (("/", "t", "2"), ("-", "t", "=")), (("/", "t", "3"), ("-", "t", "="))


@dataclass(frozen=True)
class Domain:
    """A kind of story: how it opens, what may happen, what may be asked.

    `unit` is the noun of the total, in the singular; `endings` are events that close a story with
    their own question and unit.
    """

    name: str
    unit: str
    openings: tuple[str, ...]
    start: str
    events: tuple[Event, ...]
    questions: tuple[str, ...]
    endings: tuple[tuple[Event, tuple[str, ...], str], ...]
    first: tuple[int, int] = (3, 30)


THINGS_DOMAIN = Domain(
    "things", "{thing}",
    ("{name} has {s}.", "{name} starts with {s}.", "There are {s} in {name}'s bag.", "At first {name} has {s}.", "{name} owns {s}."),
    "{name} starts with {s}.",
    (
        Event("buy_packs", ("{she} buys {a} {packs} of {b} {things}", "{she} buys {a} {packs} with {b} {things} each", "{she} gets {a} {packs} of {b} {things} at the shop"), _product_gain, PACK_GAIN),
        Event("find", ("{she} finds {a} more {things}", "{she} finds {a} more {place}", "{she} finds {a} {things} {place}", "Then {lower} finds {a} more"), _gain, GAIN),
        Event("receive", ("{friend} gives {name} {a} more", "{name} gets {a} more from {friend}", "{name} receives {a} {things} from {friend}"), _gain, GAIN),
        Event("give", ("{she} gives {a} of them to {friend}", "{she} gives {friend} {a} {things}", "{she} hands {a} {things} to {friend}"), _loss, LOSS),
        Event("lose", ("{she} loses {a} of them", "{she} loses {a} {things} {place}", "Then {lower} loses {a} {things}"), _loss, LOSS),
        Event("break", ("{a} of them break", "{a} of the {things} get broken", "{she} drops the bag and {a} {things} break"), _loss, LOSS),
        Event("give_each", ("{she} gives {b} {things} to each of {a} friends", "{she} gives {a} friends {b} {things} each", "{a} friends get {b} {things} each from {name}"), _product_loss, PACK_LOSS),
        Event("daily_gain", ("{she} collects {b} {things} a day for {a} days", "For {a} days {lower} collects {b} {things} every day", "{she} collects {b} {things} on each of {a} days"), _product_gain, PACK_GAIN),
        Event("daily_loss", ("{she} uses {b} {things} a day for {a} days", "For {a} days {lower} uses {b} {things} every day", "{she} uses {b} {things} on each of {a} days"), _product_loss, PACK_LOSS),
        Event("sell_packs", ("{she} sells {a} {packs} of {b} {things}", "{she} sells {a} {packs} with {b} {things} each", "{friend} buys {a} {packs} of {b} {things} from {name}"), _product_loss, PACK_LOSS),
        Event("double_things", ("The number of {things} doubles", "{she} doubles the number of {things}", "Then the number of {things} doubles", "{friend} doubles the number of {things} that {name} has"), _double, (("*", "t", "2"),)),
        Event("triple_things", ("The number of {things} triples", "{she} triples the number of {things}", "Then the number of {things} triples", "{friend} triples the number of {things} that {name} has"), _triple, (("*", "t", "3"),)),
        Event("give_half", ("{she} gives half of them to {friend}", "{she} gives {friend} half of the {things}", "{friend} gets half of the {things}"), _half, HALF_LOSS),
        Event("give_third", ("{she} gives a third of them to {friend}", "{she} gives {friend} a third of the {things}", "{friend} gets one third of the {things}"), _third, THIRD_LOSS),
    ),
    ("How many {things} does {name} have now?", "How many {things} are left?", "How many {things} does {lower} have in the end?", "How many {things} does {name} have?"),
    (
        (Event("split", ("{she} shares them equally among {a} friends", "{she} divides them equally among {a} friends", "{a} friends share all of them equally"), _split, (("/", "t", "a"),), "Each friend gets {r}."),
         ("How many {things} does each friend get?", "How many {things} are there for each friend?"), "{thing}"),
        (Event("arrange", ("{she} puts them on {a} equal {shelves}", "{she} spreads them evenly over {a} {shelves}", "{she} arranges them in {a} equal {shelves}"), _split, (("/", "t", "a"),), "Each {shelf} holds {r}."),
         ("How many {things} are on each {shelf}?", "How many {things} does each {shelf} hold?"), "{thing}"),
        (Event("fill_packs", ("{she} packs them into {packs} of {a}", "{she} fills {packs} with {a} {things} each", "{she} puts {a} {things} into each {pack}"), _split, (("/", "t", "a"),), "That makes {r}."),
         ("How many {packs} are there?", "How many {packs} does {lower} fill?"), "{pack}"),
        (Event("sell_all", ("{she} sells all of them for {a} dollars each", "{she} sells every {thing} for {a} dollars", "{she} sells them all at {a} dollars each"), _price, (("*", "t", "a"),), "{she} earns {r}."),
         ("How much money does {lower} earn?", "How many dollars does {name} earn?"), "dollar"),
    ),
)  # fmt: skip

MONEY_DOMAIN = Domain(
    "money", "dollar",
    ("{name} has {s}.", "{name} has saved {s}.", "There are {s} in {name}'s wallet.", "At first {name} has {s}."),
    "{name} starts with {s}.",
    (
        Event("earn_weekly", ("{she} earns {b} dollars a week for {a} weeks", "{she} saves {b} dollars every week for {a} weeks", "For {a} weeks {lower} saves {b} dollars a week"), _product_gain, PACK_GAIN),
        Event("earn", ("{she} earns {a} dollars by {job}", "{she} makes {a} dollars {job}", "By {job} {lower} earns {a} dollars"), _gain, GAIN),
        Event("gift", ("{friend} gives {name} {a} dollars", "{name} gets {a} dollars from {friend}", "{name} receives {a} dollars from {friend}"), _gain, GAIN),
        Event("buy_goods", ("{she} buys {a} {goods} for {b} dollars each", "{she} buys {a} {goods} at {b} dollars each", "{a} {goods} cost {lower_object} {b} dollars each"), _product_loss, PACK_LOSS),
        Event("spend", ("{she} spends {a} dollars", "{she} spends {a} dollars {place}", "{she} pays {a} dollars for lunch", "Lunch costs {lower_object} {a} dollars"), _loss, LOSS),
        Event("lose_money", ("{she} loses {a} dollars", "{she} loses {a} dollars {place}", "{a} dollars fall out of {her} pocket", "Then {lower} loses {a} dollars {place}"), _loss, LOSS),
        Event("lend", ("{she} lends {friend} {a} dollars", "{friend} borrows {a} dollars from {name}", "{she} lends {a} dollars to {friend}"), _loss, LOSS),
        Event("sell_goods", ("{she} sells {a} {goods} for {b} dollars each", "{she} sells {a} {goods} at {b} dollars each", "{friend} buys {a} {goods} from {name} for {b} dollars each"), _product_gain, PACK_GAIN),
        Event("pay_daily", ("{she} pays {b} dollars a day for {a} days", "For {a} days {lower} spends {b} dollars a day", "{she} spends {b} dollars on each of {a} days"), _product_loss, PACK_LOSS),
        Event("double_money", ("The money doubles", "{her_start} mother doubles the money", "Then the money doubles", "{friend} doubles the money that {name} has"), _double, (("*", "t", "2"),)),
        Event("spend_half", ("{she} spends half of the money", "Half of the money goes to a shop", "{she} pays for a ticket with half of the money"), _half, HALF_LOSS),
        Event("spend_third", ("{she} spends a third of the money", "A third of the money goes to a shop", "{she} pays for a ticket with one third of the money"), _third, THIRD_LOSS),
    ),
    ("How much money does {name} have now?", "How many dollars are left?", "How much money does {lower} have in the end?", "How many dollars does {name} have?"),
    (
        (Event("split_money", ("{she} shares the money equally among {a} friends", "{she} divides the money equally among {a} friends", "{a} friends share the money equally"), _split, (("/", "t", "a"),), "Each friend gets {r}."),
         ("How many dollars does each friend get?", "How much money does each friend get?"), "dollar"),
        (Event("spend_all", ("{she} spends all the money on {goods} for {a} dollars each", "{she} uses all the money for {goods} at {a} dollars each", "One {good} costs {a} dollars and {lower} spends all the money on {goods}"), _split, (("/", "t", "a"),), "{she} gets {r}."),
         ("How many {goods} does {lower} get?", "How many {goods} can {name} buy?"), "{good}"),
    ),
    (10, 60),
)  # fmt: skip

DISTANCE_DOMAIN = Domain(
    "distance", "kilometer",
    ("{name} has already travelled {s}.", "On Monday {name} rides {s}.", "{name} begins a trip with a ride of {s}.", "{name} travels {s} on the first day."),
    "{name} starts with {s}.",
    (
        Event("ride_hours", ("{she} rides for {a} hours at {b} kilometers an hour", "For {a} hours {lower} rides at {b} kilometers an hour", "{she} cycles {a} hours at {b} kilometers per hour"), _product_gain, PACK_GAIN, "That makes {r} in all."),
        Event("walk", ("{she} walks {a} more kilometers", "Then {lower} walks {a} kilometers", "{she} walks another {a} kilometers"), _gain, GAIN, "That makes {r} in all."),
        Event("bus", ("{she} takes the bus for {a} kilometers", "A bus takes {lower_object} {a} kilometers further", "{she} rides {a} kilometers by bus"), _gain, GAIN, "That makes {r} in all."),
        Event("daily_ride", ("{she} rides {b} kilometers a day for {a} days", "For {a} days {lower} rides {b} kilometers every day", "{she} rides {b} kilometers on each of {a} days"), _product_gain, PACK_GAIN, "That makes {r} in all."),
        Event("laps", ("{she} runs {a} laps of {b} kilometers", "{she} runs {a} laps and each lap is {b} kilometers long", "A lap is {b} kilometers long and {lower} runs {a} laps"), _product_gain, PACK_GAIN, "That makes {r} in all."),
        Event("double_trip", ("{she} doubles the distance", "Then the distance doubles", "{she} covers the same distance again"), _double, (("*", "t", "2"),), "That makes {r} in all."),
    ),
    ("How many kilometers is that in all?", "How far does {name} travel in total?", "How many kilometers does {lower} travel?", "How long is the whole trip?"),
    (
        (Event("per_day", ("The trip takes {a} days with the same distance every day", "{she} needs {a} days for all of it and covers the same distance every day", "It is split evenly over {a} days"), _split, (("/", "t", "a"),), "Each day has {r}."),
         ("How many kilometers is that a day?", "How far does {name} travel each day?"), "kilometer"),
        (Event("fares", ("Every kilometer costs {a} dollars", "The price is {a} dollars for each kilometer", "{she} pays {a} dollars per kilometer"), _price, (("*", "t", "a"),), "{she} pays {r}."),
         ("How much does the trip cost?", "How many dollars does {name} pay?"), "dollar"),
    ),
    (2, 30),
)  # fmt: skip

PAGES_DOMAIN = Domain(
    "pages", "page",
    ("{name} has a book with {s} to read.", "{name} wants to read {s}.", "A book of {name} has {s} left.", "{name} still has {s} to read."),
    "{name} starts with {s}.",
    (
        Event("read", ("{she} reads {a} pages", "On Sunday {lower} reads {a} pages", "{she} reads {a} pages on the train"), _loss, LOSS, "Now {lower} has {r} to read."),
        Event("read_daily", ("{she} reads {b} pages a day for {a} days", "For {a} days {lower} reads {b} pages every day", "{she} reads {b} pages on each of {a} days"), _product_loss, PACK_LOSS, "Now {lower} has {r} to read."),
        Event("skip", ("{she} skips {a} pages", "{she} leaves out {a} pages", "{she} jumps over {a} boring pages"), _loss, LOSS, "Now {lower} has {r} to read."),
        Event("read_half", ("{she} reads half of the pages that are left", "{she} reads half of them", "Then {lower} reads half of the rest"), _half, HALF_LOSS, "Now {lower} has {r} to read."),
        Event("borrow_book", ("{she} gets a story with {a} more pages", "{she} borrows a story with {a} more pages", "{friend} lends {lower_object} a story of {a} pages", "{she} adds a story with {a} pages"), _gain, GAIN, "Now {lower} has {r} to read."),
        Event("chapters", ("{she} adds {a} chapters of {b} pages", "The teacher adds {a} chapters of {b} pages", "{she} adds {a} chapters with {b} pages each", "{a} chapters of {b} pages are added"), _product_gain, PACK_GAIN, "Now {lower} has {r} to read."),
    ),
    ("How many pages are left?", "How many pages does {name} still have to read?", "How many pages remain?", "How many pages does {lower} have to read now?"),
    (
        (Event("finish_days", ("{she} reads the rest in {a} days with the same number of pages every day", "{she} wants to finish in {a} equal days", "{she} spreads the rest evenly over {a} days"), _split, (("/", "t", "a"),), "Each day has {r}."),
         ("How many pages is that a day?", "How many pages does {name} read each day?"), "page"),
        (Event("finish_pace", ("From then on {lower} reads {a} pages a day", "{she} reads the rest at {a} pages a day", "{she} finishes the rest with {a} pages every day"), _split, (("/", "t", "a"),), "It takes {r}."),
         ("How many days does it take?", "How many days does {name} need?"), "day"),
    ),
    (30, 120),
)  # fmt: skip

AGES_DOMAIN = Domain(
    "ages", "year",
    ("{name} is {t} years old.", "{name} is {t}.", "Today {name} is {t} years old."),
    "{name} is {s} old.",
    (
        Event("older", ("{p} is {a} years older than {q}", "{p} is older than {q} by {a} years", "{q} is {a} years younger than {p}"), _gain, GAIN, "{p} is {r} old."),
        Event("younger", ("{p} is {a} years younger than {q}", "{p} is younger than {q} by {a} years", "{q} is {a} years older than {p}"), _loss, LOSS, "{p} is {r} old."),
        Event("twice", ("{p} is twice as old as {q}", "{p} has twice the age of {q}", "{p}'s age is double {q}'s age"), _double, (("*", "t", "2"),), "{p} is {r} old."),
        Event("three_times", ("{p} is three times as old as {q}", "{p} has three times the age of {q}", "{p}'s age is {q}'s age times 3"), _triple, (("*", "t", "3"),), "{p} is {r} old."),
        Event("half_as_old", ("{p} is half as old as {q}", "{p} has half the age of {q}", "{p}'s age is half of {q}'s age"), _half, (("/", "t", "2"),), "{p} is {r} old."),
    ),
    ("How old is {p}?", "What is the age of {p}?", "What is {p}'s age?"),
    (
        (Event("in_years", ("Now {a} years pass", "Then {a} years go by", "{a} years pass"), _gain, GAIN, "After that {p} is {r} old."), ("How old is {p} then?", "How old is {p} after that?"), "year"),
        (Event("years_ago", ("Think back {a} years", "Go back {a} years", "Look back {a} years"), _loss, LOSS, "Back then {p} was {r} old."), ("How old was {p} then?", "How old was {p} at that time?"), "year"),
    ),
    (4, 30),
)  # fmt: skip

SEATS_DOMAIN = Domain(
    "passengers", "passenger",
    ("A bus starts with {s}.", "A train leaves with {s}.", "There are {s} on a tram.", "A ferry departs with {s}."),
    "It starts with {s}.",
    (
        Event("get_on", ("{a} passengers get on", "At the first stop {a} people get on", "{a} more passengers board"), _gain, GAIN, "Now there are {r}."),
        Event("get_off", ("{a} passengers get off", "At the next stop {a} people get off", "{a} passengers leave"), _loss, LOSS, "Now there are {r}."),
        Event("groups_on", ("{a} groups of {b} people get on", "{a} groups with {b} people each get on", "{a} families of {b} people board"), _product_gain, PACK_GAIN, "Now there are {r}."),
        Event("groups_off", ("{a} groups of {b} people get off", "{a} groups with {b} people each get off", "{a} families of {b} people leave"), _product_loss, PACK_LOSS, "Now there are {r}."),
        Event("half_off", ("Half of the passengers get off", "Half of the people get off", "Then half of them leave"), _half, HALF_LOSS, "Now there are {r}."),
        Event("third_off", ("A third of the passengers get off", "One third of the people get off", "Then a third of them leave"), _third, THIRD_LOSS, "Now there are {r}."),
        Event("crowd_doubles", ("The number of passengers doubles", "Then the number of people doubles", "At the station the number of passengers doubles"), _double, (("*", "t", "2"),), "Now there are {r}."),
    ),
    ("How many passengers are there now?", "How many people are on board in the end?", "How many passengers are left?", "How many passengers are on board?"),
    (
        (Event("tickets", ("Everyone on board pays {a} dollars", "Each remaining passenger pays {a} dollars", "A ticket for each of them costs {a} dollars"), _price, (("*", "t", "a"),), "They pay {r}."),
         ("How much do they pay in all?", "How many dollars do they pay together?"), "dollar"),
        (Event("cars", ("They sit in {a} cars with the same number of people", "They spread evenly over {a} cars", "They are divided equally among {a} cars"), _split, (("/", "t", "a"),), "Each car has {r}."),
         ("How many passengers are in each car?", "How many people sit in each car?"), "passenger"),
    ),
    (5, 50),
)  # fmt: skip

RECTANGLE_DOMAIN = Domain(
    "boards", "meter",
    ("One side of a garden is {t} meters long.", "The first side of a field is {s} long.", "A yard has a side of {s}.", "The wall of a house is {s} long."),
    "The first side is {s} long.",
    (
        Event("side_longer", ("The next side is {a} meters longer", "The next side is longer by {a} meters", "The next side has {a} meters more"), _gain, GAIN, "The next length is {r}."),
        Event("side_shorter", ("The next side is {a} meters shorter", "The next side is shorter by {a} meters", "The next side has {a} meters less"), _loss, LOSS, "The next length is {r}."),
        Event("path_twice", ("A path is twice as long as that", "The path beside it is twice as long", "A path is twice that long", "A path has double that length"), _double, (("*", "t", "2"),), "The next length is {r}."),
        Event("wall_half", ("A wall is half as long as that", "A wall has half that length", "The wall beside it is half that long"), _half, (("/", "t", "2"),), "The next length is {r}."),
        Event("extend", ("It is extended by {a} boards of {b} meters", "{a} boards of {b} meters make it longer", "It gets longer by {a} boards of {b} meters"), _product_gain, PACK_GAIN, "The next length is {r}."),
    ),
    ("How many meters is that?", "How long is that last length?", "What is the last length in meters?"),
    (
        (Event("area", ("A rectangle has this length and a width of {a} meters", "A rectangle is that long and {a} meters wide", "A rectangle has that length and is {a} meters wide"), _price, (("*", "t", "a"),), "The area is {r}."),
         ("What is the area of the rectangle?", "How many square meters is the rectangle?"), "square meter"),
        (Event("pieces", ("It is cut into {a} equal parts", "It is cut into {a} equal pieces", "It is divided into {a} equal parts"), _split, (("/", "t", "a"),), "Each part has {r}."),
         ("How long is each part?", "How many meters long is each part?"), "meter"),
    ),
    (4, 30),
)  # fmt: skip

DOMAINS = (THINGS_DOMAIN, MONEY_DOMAIN, DISTANCE_DOMAIN, PAGES_DOMAIN, AGES_DOMAIN, SEATS_DOMAIN, RECTANGLE_DOMAIN)
DOMAIN_WEIGHTS = (27, 20, 11, 12, 10, 12, 8)
