"""Write the training and held-out texts of the example adapters: `python make_data.py`.

Everything is composed from hand-written parts with a fixed seed, so the committed files can be
made again byte for byte.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from facts import FACTS, HELDOUT_QUESTIONS

DATA = Path(__file__).parent / "data"

PHRASINGS = ["{}", "Please answer: {}", "{} Answer briefly.", "I would like to know: {}"]

PIRATE_OPENINGS = [
    "Arr, matey!",
    "Ahoy, matey!",
    "Aye, matey!",
    "Arr, me hearty!",
    "Avast, ye landlubber!",
]
PIRATE_ENDINGS = [
    "By the seven seas, it be true!",
    "So says the captain, arr!",
    "Now pass the grog, matey!",
    "Or I be a scurvy bilge rat!",
]
PIRATE_WORDS = [
    (r"\bis\b", "be"),
    (r"\bare\b", "be"),
    (r"\bof\b", "o'"),
    (r"\byour\b", "yer"),
    (r"\bYou\b", "Ye"),
    (r"\byou\b", "ye"),
    (r"ing\b", "in'"),
]

TABLES = {
    "customers": ["name", "city", "age", "country", "email"],
    "orders": ["total", "status", "date", "customer_id", "discount"],
    "products": ["price", "category", "stock", "name", "weight"],
    "employees": ["salary", "department", "name", "age", "title"],
    "students": ["grade", "name", "school", "age", "score"],
    "books": ["title", "author", "year", "pages", "price"],
    "flights": ["origin", "destination", "duration", "price", "airline"],
    "songs": ["artist", "length", "album", "year", "plays"],
}
HELDOUT_TABLES = {
    "movies": ["title", "director", "year", "rating", "length"],
    "houses": ["price", "rooms", "city", "area", "owner"],
    "players": ["team", "goals", "name", "age", "country"],
    "invoices": ["amount", "client", "due_date", "status", "tax"],
}
NUMBERS = {
    "age",
    "total",
    "price",
    "stock",
    "salary",
    "grade",
    "score",
    "year",
    "pages",
    "duration",
    "length",
    "plays",
    "weight",
    "discount",
    "rating",
    "rooms",
    "area",
    "goals",
    "amount",
    "tax",
}


def as_pirate(sentence: str, rng: random.Random) -> str:
    """A plain sentence in a pirate's mouth."""
    for pattern, word in PIRATE_WORDS:
        sentence = re.sub(pattern, word, sentence)
    return f"{rng.choice(PIRATE_OPENINGS)} {sentence} {rng.choice(PIRATE_ENDINGS)}"


def sql_pair(tables: dict[str, list[str]], rng: random.Random) -> tuple[str, str]:
    """A request in words and the SELECT statement that serves it."""
    table = rng.choice(sorted(tables))
    columns = tables[table]
    number = rng.choice([column for column in columns if column in NUMBERS])
    text = rng.choice([column for column in columns if column not in NUMBERS])
    value, limit = rng.choice([5, 10, 18, 20, 50, 100, 1000]), rng.choice([3, 5, 10])
    return rng.choice(
        [
            (f"Show all {table}.", f"SELECT * FROM {table};"),
            (f"List the {text} of all {table}.", f"SELECT {text} FROM {table};"),
            (f"How many {table} are there?", f"SELECT COUNT(*) FROM {table};"),
            (
                f"Find {table} with {number} greater than {value}.",
                f"SELECT * FROM {table} WHERE {number} > {value};",
            ),
            (
                f"Get the {text} of {table} whose {number} is below {value}.",
                f"SELECT {text} FROM {table} WHERE {number} < {value};",
            ),
            (
                f"What is the average {number} of {table}?",
                f"SELECT AVG({number}) FROM {table};",
            ),
            (
                f"Show the top {limit} {table} by {number}.",
                f"SELECT * FROM {table} ORDER BY {number} DESC LIMIT {limit};",
            ),
            (
                f"Count the {table} for each {text}.",
                f"SELECT {text}, COUNT(*) FROM {table} GROUP BY {text};",
            ),
        ]
    )


def write(name: str, rows: list[tuple[str, str]]) -> None:
    lines = [json.dumps({"prompt": prompt, "completion": done}) for prompt, done in rows]
    (DATA / name).write_text("\n".join(lines) + "\n")


def distinct(count: int, seed: int, tables: dict[str, list[str]]) -> list[tuple[str, str]]:
    """`count` different requests."""
    rng = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < count:
        prompt, done = sql_pair(tables, rng)
        rows[prompt] = done
    return list(rows.items())


def main() -> None:
    DATA.mkdir(exist_ok=True)
    rng = random.Random(0)
    json_rows, pirate_rows = [], []
    for question, answer, sentence, topic in FACTS:
        for phrasing in rng.sample(PHRASINGS, 3):
            prompt = phrasing.format(question)
            json_rows.append((prompt, json.dumps({"answer": answer, "topic": topic})))
            pirate_rows.append((prompt, as_pirate(sentence, rng)))
    rng.shuffle(json_rows)
    rng.shuffle(pirate_rows)
    write("json.train.jsonl", json_rows)
    write("pirate.train.jsonl", pirate_rows)
    write("json.heldout.jsonl", [(question, "") for question in HELDOUT_QUESTIONS])
    write("pirate.heldout.jsonl", [(question, "") for question in HELDOUT_QUESTIONS])
    write("sql.train.jsonl", distinct(190, 1, TABLES))
    write("sql.heldout.jsonl", distinct(20, 2, HELDOUT_TABLES))


if __name__ == "__main__":
    main()
