"""Private data that is found, left alone and missed, and how fast, beside other tools.

The texts are made up by private_texts.py. Found is a value of which nine tenths of the characters
are covered by findings of its kind; a tool is judged by the kinds that it knows. False hits are
counted in texts that hold nothing private, and in the text of Python's own documentation, whose few
addresses of authors and examples are findings: that column only compares tools. Tools that are not
installed are left out: presidio-analyzer (a blank spaCy model, score from 0.4), datatrove,
scrubadub, detect-secrets.

    python redact.py [--count 300] [--seed 7] [--megabytes 1]
"""

import argparse
import importlib
import tempfile
import time
from collections import Counter
from pathlib import Path

from private_texts import labelled, negatives

from mds_data.corpus import sample_corpus
from mds_data.privacy import find


def ours():
    return lambda text: [(start, end, kind) for start, end, kind in find(text)]


def presidio():
    engine = importlib.import_module("presidio_analyzer")
    nlp = importlib.import_module("presidio_analyzer.nlp_engine")
    spacy = importlib.import_module("spacy")

    class Blank(nlp.SpacyNlpEngine):
        def __init__(self):
            super().__init__(models=[{"lang_code": "en", "model_name": "blank"}])
            self.nlp = {"en": spacy.blank("en")}

        def load(self):
            pass

    analyzer = engine.AnalyzerEngine(nlp_engine=Blank(), supported_languages=["en"])
    kinds = {
        "EMAIL_ADDRESS": "EMAIL", "IP_ADDRESS": "IP", "CREDIT_CARD": "CARD", "IBAN_CODE": "IBAN",
        "PHONE_NUMBER": "PHONE", "US_SSN": "NATIONAL_ID", "UK_NINO": "NATIONAL_ID",
        "UK_NHS": "NATIONAL_ID", "ES_NIF": "NATIONAL_ID", "IT_FISCAL_CODE": "NATIONAL_ID",
        "PL_PESEL": "NATIONAL_ID", "IN_PAN": "NATIONAL_ID", "IN_AADHAAR": "NATIONAL_ID",
    }  # fmt: skip

    def run(text):
        found = analyzer.analyze(text, language="en", score_threshold=0.4, entities=list(kinds))
        return [(each.start, each.end, kinds[each.entity_type]) for each in found]

    return run


def datatrove():
    library = importlib.import_module("datatrove.pipeline.formatters.pii")
    formatter = library.PIIFormatter(only_remove_public_ips=False)
    replacers = (("EMAIL", formatter.emails_replacer), ("IP", formatter.ip_replacer))

    def run(text):
        return [
            (*match.span(), kind)
            for kind, replacer in replacers
            for match in replacer.regex.finditer(text)
            if replacer.validator is None or replacer.validator(match[0])
        ]

    return run


def scrubadub():
    library = importlib.import_module("scrubadub")
    detectors = library.detectors
    scrubber = library.Scrubber(
        locale="en_US", detector_list=[
            detectors.EmailDetector(locale="en_US"), detectors.PhoneDetector(locale="en_US"),
            detectors.CreditCardDetector(locale="en_US"),
            detectors.en_US.SocialSecurityNumberDetector(locale="en_US"),
        ],
    )  # fmt: skip
    kinds = {
        "email": "EMAIL", "phone": "PHONE", "credit_card": "CARD",
        "social_security_number": "NATIONAL_ID",
    }  # fmt: skip
    return lambda text: [
        (each.beg, each.end, kinds[each.type]) for each in scrubber.iter_filth(text)
        if each.type in kinds
    ]  # fmt: skip


def detect_secrets():
    collection = importlib.import_module("detect_secrets").SecretsCollection
    settings = importlib.import_module("detect_secrets.settings")
    path = Path(tempfile.mkdtemp()) / "text.txt"

    def run(text):
        path.write_text(text)
        secrets = collection()
        with settings.default_settings():
            secrets.scan_file(str(path))
        found = []
        for _, secret in secrets:
            at = text.find(secret.secret_value or "\0")
            if at >= 0:
                found.append((at, at + len(secret.secret_value), "SECRET"))
        return found

    return run


TOOLS = {
    "mds-data": (ours, {"EMAIL", "IP", "CARD", "IBAN", "PHONE", "NATIONAL_ID", "SECRET"}),
    "presidio": (presidio, {"EMAIL", "IP", "CARD", "IBAN", "PHONE", "NATIONAL_ID"}),
    "datatrove": (datatrove, {"EMAIL", "IP"}),
    "scrubadub": (scrubadub, {"EMAIL", "PHONE", "CARD", "NATIONAL_ID"}),
    "detect-secrets": (detect_secrets, {"SECRET"}),
}
KINDS = ("EMAIL", "IP", "CARD", "IBAN", "PHONE", "NATIONAL_ID", "SECRET")


def covered(found, start, end, kind):
    places = {
        place
        for begin, stop, named in found
        if named == kind
        for place in range(max(begin, start), min(stop, end))
    }
    return len(places) >= 0.9 * (end - start)


def judge(run, known, texts, innocent):
    """Shares found by kind, and the share of all hits that touch a value."""
    right, total, touching, hits = Counter(), Counter(), 0, 0
    for text, start, end, kind in texts:
        found = run(text)
        if kind in known:
            total[kind] += 1
            right[kind] += covered(found, start, end, kind)
            touching += sum(begin < end and start < stop for begin, stop, _ in found)
            hits += len(found)
    false = sum(len(run(text)) for text in innocent)
    return {kind: right[kind] / total[kind] for kind in known}, touching / max(1, hits + false)


def speed(run, documents):
    """Megabytes a second of CPU time, and hits a megabyte, on ordinary text."""
    size = sum(len(text.encode()) for text in documents) / 1e6
    began = time.process_time()
    hits = sum(len(run(text)) for text in documents)
    return size / (time.process_time() - began), hits / size


def ordinary(megabytes):
    size, texts = 0, []
    for document in sample_corpus():
        texts.append(document.text)
        size += len(document.text)
        if size > megabytes * 1e6:
            break
    return texts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="values of each kind")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--megabytes", type=float, default=1)
    arguments = parser.parse_args()
    texts = list(labelled(arguments.count, seed=arguments.seed))
    innocent = list(negatives(7 * arguments.count, seed=arguments.seed))
    documents = ordinary(arguments.megabytes)
    print(f"| tool | {' | '.join(KINDS)} | precision | MB/s | hits a MB |")
    print("|---|" + "---|" * (len(KINDS) + 3))
    for name, (make, known) in TOOLS.items():
        try:
            run = make()
        except ImportError:
            continue
        shares, precision = judge(run, known, texts, innocent)
        rate, hits = speed(run, documents if name == "mds-data" else documents[:60])
        cells = [f"{shares[kind]:.3f}" if kind in known else "-" for kind in KINDS]
        print(
            f"| {name} | {' | '.join(cells)} | {precision:.3f} | {rate:.2f} | {hits:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
