"""How far a model carries the rounding of products of more rows: drafts, and copies of the prompts without drafts.

    python -m experiments.speculation_depth RESULTS.jsonl [--layers 4,16,64] [--tier f32,q4]

Narrow models of random weights, three GDN layers to one of full attention. Appends a line for every model: the largest
error of S and history of any layer after 96 tokens, against two prompts alone, of the prompts drafted by a script, a
window having four tokens, and of the prompts beside three copies of themselves.
"""

import argparse
import dataclasses
import json
import pathlib

from experiments.record import origin
from gdn_jax.bench import models
from gdn_jax.decoder.decoder import Decoder
from gdn_jax.evidence import bounds, speculation, subjects

GEOMETRY = "128,4,12,32,32,4"
OPTIONS = speculation.Options(tokens=96)


def main(results: pathlib.Path, depths: list[int], tiers: list[str]) -> None:
    name, gdn = subjects.parse_geometry(GEOMETRY)
    period = models.decoder_by_name(name, gdn).layer_types[:4]
    with results.open("a") as file:
        for tier in tiers:
            for depth in depths:
                cfg = dataclasses.replace(
                    models.decoder_by_name(name, gdn), layer_types=period * (depth // 4), mlp_types=("dense",) * depth
                )
                model = Decoder(cfg=cfg, weights=models.decoder_weights(1, cfg, tier))
                drafts, _ = speculation.run(name, model, OPTIONS)
                rows = [dict(zip(drafts.columns, row, strict=True)) for row in drafts.rows]
                limit = max(row["bound"] for row in rows)
                line = {
                    **origin(),
                    "geometry": GEOMETRY,
                    "tier": tier,
                    "layers": depth,
                    "differing": sum(row["differing"] for row in rows),
                    "drafted": max(row["S_max_rel"] for row in rows),
                    "beside_copies": limit / bounds.SPECULATION_ROWS if limit > bounds.SPECULATION_STATE else None,
                    "passed": drafts.passed,
                }
                file.write(json.dumps(line) + "\n")
                print(line, flush=True)


if __name__ == "__main__":
    form = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    form.add_argument("results", type=pathlib.Path)
    form.add_argument("--layers", type=lambda text: [int(part) for part in text.split(",")], default=[4, 16, 64])
    form.add_argument("--tier", type=lambda text: text.split(","), default=["f32", "q4"])
    given = form.parse_args()
    main(given.results, given.layers, given.tier)
