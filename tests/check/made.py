"""Cases by their op, as tests write them."""

from dsafuse.check import cases
from dsafuse.check.cases import Case


def mla(**fields):
    return Case(op=cases.MLA, **fields)


def indexer(**fields):
    return Case(op=cases.INDEXER, **fields)


def qk(**fields):
    return Case(op=cases.PREPARE_QK, **fields)


def latents(**fields):
    return Case(op=cases.PREPARE_LATENTS, **fields)


def queries(**fields):
    return Case(op=cases.PREPARE_QUERIES, **fields)


EVERY_OP = (mla, indexer, qk, latents, queries)
