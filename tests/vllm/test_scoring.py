"""vLLM's indexer op behind the launch that clears its rows: told so exactly then, and with vLLM's own arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse.vllm import host

# What `SparseAttnIndexer.forward_cuda` of vLLM 0.26 passes under each name of its op's: attributes of the module.
ATTRIBUTES = (
    *("quant_block_size", "scale_fmt", "topk_tokens", "head_dim", "max_model_len", "topk_indices_buffer"),
    *("skip_k_cache_insert", "use_pcp", "use_fp4_cache", "dcp_rank", "dcp_world_size", "cp_kv_cache_interleave_size"),
)


def indexer_op(told: list[tuple[Any, ...]]) -> Any:
    """With a value of its own under each name; called as vLLM calls it, it says so."""

    class Op:
        def __call__(self, *args: Any) -> None:
            told.append(("vLLM's own", *args))

    made = Op()
    made.__dict__.update({name: f"its {name}" for name in ATTRIBUTES})
    made.__dict__.update(
        max_total_seq_len="its total", k_cache=SimpleNamespace(prefix="its prefix", kv_cache="its cache")
    )
    return made


@pytest.mark.parametrize("clears", [True, False])
def test_vllms_op_is_told_exactly_where_the_rows_were_cleared(monkeypatch: pytest.MonkeyPatch, clears: bool) -> None:
    from dsafuse.vllm import scoring
    from dsafuse.vllm import wrapper as module

    told: list[tuple[Any, ...]] = []
    op = indexer_op(told)
    layer = SimpleNamespace(
        indexer=SimpleNamespace(
            indexer_op=op, k_norm=SimpleNamespace(weight="w", bias="b"), k_cache=op.k_cache, topk_indices_buffer=None
        ),
        dsafuse_plan=SimpleNamespace(clears_topk=clears),
        mla_attn=SimpleNamespace(layer_name="layer", impl=SimpleNamespace(topk_indices_buffer="its topk")),
        rotary_emb=SimpleNamespace(cos_sin_cache="table"),
        indexer_rope_emb=SimpleNamespace(cos_sin_cache="index table"),
        _index_inputs=lambda *_: ("index q", "k and weights", "q out", "weights out"),
        _output=lambda _: "output",
        _topk_is_ready=lambda: told.append(("ready",)),
    )
    wrapper = module.FusedMultiHeadLatentAttentionWrapper
    layer._run_indexer = lambda *args, **kwargs: wrapper._run_indexer(layer, *args, **kwargs)
    ops = SimpleNamespace(
        dsafuse=SimpleNamespace(
            qk_prepare=lambda *args: told.append(("qk_prepare", args[-2])),
            mla_attend=lambda *args: told.append(("mla_attend",)),
        ),
        vllm=SimpleNamespace(sparse_attn_indexer=lambda *args, **kwargs: told.append(("told", args, kwargs))),
    )
    monkeypatch.setattr(module, "torch", SimpleNamespace(ops=ops))
    monkeypatch.setattr(scoring, "torch", SimpleNamespace(ops=ops))
    for each in (module, scoring):
        monkeypatch.setattr(each, "_encode_layer_name", lambda name: f"layer {name}")
    assert wrapper._together(layer, "hidden", "q_c", "q", "kv_c", "k_pe", "positions") == "output"
    prepared, scored, *rest = told
    assert rest == [("ready",), ("mla_attend",)]
    assert prepared == ("qk_prepare", "its topk_indices_buffer" if clears else None)
    if not clears:
        assert scored == ("vLLM's own", "hidden", "q out", "k and weights", "weights out")
        return
    name, args, kwargs = scored
    assert name == "told"
    (symbol,) = (symbol for symbol in host.SCORING_SYMBOLS["0.26"] if symbol.name == "sparse_attn_indexer")
    assert symbol.parameters is not None
    given = dict(zip(symbol.parameters, args, strict=False)) | kwargs
    assert given == {
        **{name: f"its {name}" for name in ATTRIBUTES},
        "hidden_states": "hidden",
        "k_cache_prefix": "layer its prefix",
        "kv_cache": "its cache",
        "q_quant": "q out",
        "q_scale": None,
        "k": "k and weights",
        "weights": "weights out",
        "total_seq_lens": "its total",
        "skip_topk_buffer_clear": True,
    }
    assert set(given) == set(symbol.parameters)


def test_the_cpu_builds_op_leaves_out_the_fill_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a context that is shorter than a row, the row keeps what it held."""
    from dsafuse.vllm.cpu import indexer

    batch = SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, 2]), seq_lens=torch.tensor([3]), block_table=torch.tensor([[0]])
    )
    cache = torch.zeros((1, 16, 132), dtype=torch.uint8)
    context = SimpleNamespace(
        attn_metadata={"name": batch}, no_compile_layers={"name": SimpleNamespace(kv_cache=cache)}
    )
    monkeypatch.setattr(indexer, "get_forward_context", lambda: context)
    q, weights = torch.randn(2, 4, 128), torch.rand(2, 4)
    rows = {}
    for clear in (True, False):
        rows[clear] = torch.full((3, 5), 7, dtype=torch.int32)
        indexer.cpu_index_topk(q, None, weights, rows[clear], False, clear, "name")
    assert torch.equal(rows[True][:2, :3], rows[False][:2, :3])
    assert (rows[True][:2, 3:] == -1).all()
    assert (rows[False][:2, 3:] == 7).all()
    assert (rows[True][2] == 7).all()
    assert rows[True][0, :3].tolist() == [1, 0, -1]
