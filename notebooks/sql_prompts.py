"""Questions about the database of a bookshop, all different: one kind of request, of which a drafter can learn.

python notebooks/sql_prompts.py 380 > questions.jsonl
"""

import itertools
import json
import random
import string
import sys
from collections.abc import Iterator

SCHEMA = """Write one SQL query for each question about a bookshop, and nothing else.
authors(id, name, country, born)
books(id, title, author_id, genre, price, year, stock)
customers(id, name, city, joined)
orders(id, customer_id, book_id, quantity, ordered_on)
Example: How many books cost more than 9 dollars?
```sql
SELECT COUNT(*) FROM books WHERE price > 9;
```"""

TEMPLATES = """
{ask} the titles of all {genre} books.
{ask} the titles and prices of {genre} books that cost less than {price} dollars.
{ask} the {n} most expensive {genre} books.
{ask} the {n} cheapest books published after {year}.
{ask} all books published between {year} and {later}.
{ask} all authors born before {born}.
{ask} the names of the authors from {country}.
{ask} the books written by authors from {country}, with the name of each author.
{ask} the customers who live in {city}.
{ask} the customers from {city} who joined after {later}.
{ask} the orders of customers in {city}, the newest first.
{ask} the {n} customers with the most orders.
{ask} the {n} best-selling {genre} books.
{ask} every book of which fewer than {n} copies are in stock.
{ask} the authors who wrote more than {n} {genre} books.
{ask} the customers who ordered more than {n} copies of one book.
{ask} the total quantity sold for each {genre} book.
{ask} the {genre} books that nobody has ordered.
{ask} the cities with more than {n} customers.
How many {genre} books do we have?
How many {genre} books were published in {year}?
How many authors come from {country}?
How many customers live in {city}?
How many orders did customers from {city} place in {later}?
What is the average price of {genre} books?
What is the average price of books published after {year}?
What did customers in {city} spend in total?
What is the most expensive book by an author from {country}?
Which authors from {country} wrote {genre} books?
Which customers ordered {genre} books in {later}?
Which {genre} book has the highest price?
Which genres have more than {n} books that cost over {price} dollars?
Raise the price of all {genre} books by {n} percent.
Add {n} to the stock of every {genre} book published before {year}.
Delete all orders placed before {later}.
Move every customer from {city} to {city2}.
"""

VALUES = {
    "ask": "List|Show me|Find|Give me|I need|Write a query for|Please select",
    "genre": "fantasy|crime|poetry|history|travel|cooking|science|romance|horror|children's|biography|art",
    "country": "France|Japan|Brazil|Canada|Norway|India|Kenya|Italy|Mexico|Poland|Ireland|Chile",
    "city": "Berlin|Lisbon|Boston|Osaka|Cairo|Oslo|Madrid|Toronto|Prague|Sydney|Vienna|Dublin",
    "city2": "Paris|Rome|Athens|Seoul|Lima",
    "price": "5|8|10|12|15|20|25|30|40",
    "n": "2|3|4|5|6|8|10|12|20",
    "born": "1900|1920|1940|1950|1960|1970|1980",
    "year": "1985|1990|1995|1999|2001|2005|2008|2010",
    "later": "2012|2014|2016|2018|2019|2020|2021|2022|2023",
}


def questions() -> Iterator[str]:
    """Different questions, always in the same order: one of each template in turn, as long as it has values left."""
    draw, columns = random.Random(0), []
    for template in filter(None, TEMPLATES.splitlines()):
        names = sorted({name for _, name, _, _ in string.Formatter().parse(template) if name})
        choices = itertools.product(*(VALUES[name].split("|") for name in names))
        texts = [template.format(**dict(zip(names, chosen, strict=True))) for chosen in choices]
        columns.append(draw.sample(texts, len(texts)))
    return (text for row in itertools.zip_longest(*columns) for text in row if text)


if __name__ == "__main__":
    for question in itertools.islice(questions(), int(sys.argv[1])):
        messages = [{"role": "system", "content": SCHEMA}, {"role": "user", "content": question}]
        print(json.dumps({"messages": messages}))
