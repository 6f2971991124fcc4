"""What each rank of a shared model generates; without transformers, so that ranks start soon."""

from __future__ import annotations

from mds_core import Layout, ProcessGroups
from mds_core.models import GPT
from mds_train.generate import BeamSearch, Sampling, beam_search, generate, load_model

PROMPTS = [[5, 9, 300, 17], [42], [8, 8, 8, 210, 100, 7, 31], [1, 2]]
END = 0
NEW = 24


def generated_by_all_ranks(folder: str) -> list[list[int]]:
    return answers(load_model(folder, groups=ProcessGroups.build(Layout(tp_size=2))))


def answers(model: GPT) -> list[list[int]]:
    sampling = Sampling(temperature=0.8, repetition_penalty=1.2)
    drawn = generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling, end_token=END)
    beams = beam_search(model, PROMPTS[0], max_new_tokens=NEW, search=BeamSearch(beams=3))
    return [*drawn, *(list(beam.tokens) for beam in beams)]
