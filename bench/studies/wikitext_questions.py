"""Makes questions from a wikitext file: in SQuAD's JSON format (version 1.1), which encoders are trained on and asked,
or with --choices as JSON lines, which decoders are asked.

    python bench/studies/wikitext_questions.py wikitext2-test.txt -o train.json
    python bench/studies/wikitext_questions.py wikitext2-valid.txt -o held-out.json
    python bench/studies/wikitext_questions.py wikitext2-test.txt -o questions.jsonl --choices 4

A question is a part of one sentence in which a year, a count or a name is replaced by "which year", "how many" or
"what"; its answer is what was replaced, and its context the paragraph. Words of the sentence outside of that part are
left out of the question, so the model has to find the sentence by some of its words and the answer by its kind. Wrong
choices are of the answer's kind, from the same paragraph where it has enough, or else from its article: which one is
right stands in the paragraph alone. The questions depend on the text and the seed alone. Standard library only.
"""

import argparse
import json
import pathlib
import random
import re

YEAR = re.compile(r"(?<=\bin )(1[0-9]{3}|20[0-2][0-9])\b")
COUNT = re.compile(r"\b(\d[\d,]*(?:\.\d+)?)(?= [a-z]{3,}s\b)")
NAME = re.compile(r"(?<=[a-z,] )([A-Z][a-z]+(?: (?:of |the )?[A-Z][a-z]+){1,3})\b")
KINDS = [("which year", YEAR), ("how many", COUNT), ("what", NAME)]
BEFORE, AFTER = 9, 7


def plain(line: str) -> str:
    """Wikitext's separate punctuation, joined to the words again."""
    line = re.sub(r" @([-,.])@ ", r"\1", line.strip())
    line = re.sub(r" ([,.;:!?)\]])", r"\1", line)
    line = re.sub(r"([(\[]) ", r"\1", line)
    line = re.sub(r" (n't|'s|'re|'ve|'ll|'d|'m)\b", r"\1", line)
    return re.sub(r"\s+", " ", line.replace(" s' ", "s' "))


def sentences(paragraph: str):
    """Begin and end of each sentence."""
    begin = 0
    for end in re.finditer(r"[.!?] (?=[A-Z\"])", paragraph):
        yield begin, end.start() + 1
        begin = end.end()
    yield begin, len(paragraph)


def question(paragraph: str, begin: int, end: int, answer: re.Match, word: str) -> str:
    before = paragraph[begin : answer.start()].split()[-BEFORE:]
    after = paragraph[answer.end() : end].rstrip(".!?").split()[:AFTER]
    return " ".join([*before, word, *after]) + "?"


def wrong_choices(paragraph: str, article: str, kind: re.Pattern, answer: str, most: int, chance: random.Random):
    """Other texts of a kind, those of the paragraph first; fewer than `most` where the article has no more."""
    found = []
    for text in (paragraph, article):
        others = sorted({m[0] for m in kind.finditer(text)} - {answer, *found})
        chance.shuffle(others)
        # A name within another one would be as right.
        found += [own for own in others if own not in answer and answer not in own]
    return found[:most]


def choice_lines(articles, count: int, seed: int):
    """A line for each question of which enough wrong choices are there."""
    chance = random.Random(seed)
    for article in articles:
        whole = "\n".join(paragraph["context"] for paragraph in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                word = next(word for word, _ in KINDS if word in qa["question"].split("?")[0])
                answer = qa["answers"][0]["text"]
                context = paragraph["context"]
                choices = wrong_choices(context, whole, dict(KINDS)[word], answer, count - 1, chance)
                if len(choices) < count - 1:
                    continue
                right = chance.randrange(count)
                choices.insert(right, answer)
                question = f"Question: {qa['question']}\nAnswer:"
                yield {"context": context, "question": question, "choices": choices, "answer": right, "id": qa["id"]}


def asked(paragraph: str, most: int, chance: random.Random):
    """Questions from different sentences, at most that many."""
    found = []
    for begin, end in sentences(paragraph):
        if len(paragraph[begin:end].split()) < 10 or "<unk>" in paragraph[begin:end]:
            continue
        for word, pattern in KINDS:
            answers = [m for m in pattern.finditer(paragraph, begin, end) if m.start() > begin]
            if answers:
                answer = chance.choice(answers)
                found.append((question(paragraph, begin, end, answer, word), answer))
    chance.shuffle(found)
    return found[:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True)
    parser.add_argument("--each", type=int, default=3, help="most questions of a paragraph")
    parser.add_argument("--most", type=int, default=0, help="most questions; 0 for all")
    parser.add_argument("--choices", type=int, default=0, metavar="N", help="JSON lines of N choices for decoders")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    articles, kinds, count = [], {word: 0 for word, _ in KINDS}, 0
    for line in arguments.text.read_text().splitlines():
        title = re.fullmatch(r" = ([^=].*[^=]) = ", line)
        if title:
            articles.append({"title": plain(title[1]), "paragraphs": []})
        elif articles and not line.strip().startswith("=") and 40 <= len(line.split()) <= 260:
            context = plain(line)
            qas = []
            for text, answer in asked(context, arguments.each, chance):
                if arguments.most and count >= arguments.most:
                    break
                kinds[next(word for word, _ in KINDS if f"{word} " in f"{text.rstrip('?')} ")] += 1
                qas.append(
                    {
                        "id": f"{len(articles)}-{len(articles[-1]['paragraphs'])}-{len(qas)}",
                        "question": text,
                        "answers": [{"text": answer[0], "answer_start": answer.start()}],
                    }
                )
                count += 1
            if qas:
                articles[-1]["paragraphs"].append({"context": context, "qas": qas})
    articles = [article for article in articles if article["paragraphs"]]
    if arguments.choices:
        lines = list(choice_lines(articles, arguments.choices, arguments.seed))
        arguments.output.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        print(f"{arguments.output}: {len(lines)} questions of {arguments.choices} choices")
        return
    arguments.output.write_text(json.dumps({"version": "1.1", "data": articles}, ensure_ascii=False, indent=1) + "\n")
    paragraphs = sum(len(article["paragraphs"]) for article in articles)
    print(f"{arguments.output}: {count} questions about {paragraphs} paragraphs; {kinds}")


if __name__ == "__main__":
    main()
