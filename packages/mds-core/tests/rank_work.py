"""All that the tests want from several ranks, so that each number of ranks starts once."""

from __future__ import annotations

from typing import Any

import core_cells
import distillation_reports
import group_reports
import pipeline_cells
import product_reports

from mds_core.groups import Layout


def on_two_ranks() -> dict[str, Any]:
    return (
        core_cells.train_all(core_cells.ALL, Layout(tp_size=2))
        | core_cells.train_all(core_cells.ULYSSES | core_cells.UNSUMMED, Layout(ulysses_size=2))
        | core_cells.train_all(core_cells.RING, Layout(ulysses_size=2))
        | core_cells.train_all(core_cells.DP, Layout(dp_size=2))
        | core_cells.train_all(core_cells.EP, Layout(dp_size=2, ep_size=2))
        | core_cells.ulysses_report()
        | product_reports.report()
        | pipeline_cells.train_pipelines(pipeline_cells.ALL, Layout(pp_size=2))
        | pipeline_cells.count_all(Layout(pp_size=2))
        | pipeline_cells.ran_all(Layout(pp_size=2))
        | {"distilled": distillation_reports.on_two_ranks()}
    )


def on_four_ranks() -> dict[str, Any]:
    return (
        group_reports.report_all()
        | core_cells.train_all(core_cells.TP4, Layout(tp_size=4))
        | core_cells.train_all(core_cells.ULYSSES_TP2, Layout(tp_size=2, ulysses_size=2))
        | core_cells.train_all(core_cells.RING_TP2, Layout(tp_size=2, ulysses_size=2))
        | core_cells.train_all(core_cells.RING4, Layout(ulysses_size=4))
        | core_cells.train_all(core_cells.EP_TP2, Layout(tp_size=2, dp_size=2, ep_size=2))
        | core_cells.train_all(core_cells.EP_ULYSSES, Layout(ulysses_size=2, dp_size=2, ep_size=2))
        | pipeline_cells.train_pipelines(pipeline_cells.TP2, Layout(tp_size=2, pp_size=2))
        | pipeline_cells.train_pipelines(pipeline_cells.PP4, Layout(pp_size=4))
        | pipeline_cells.train_pipelines(pipeline_cells.ULYSSES, Layout(ulysses_size=2, pp_size=2))
    )
