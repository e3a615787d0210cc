"""Sources of slabs, and loads that wait for another replica."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from loraplex.adapters.slab import SlabLayout, slab_gaps, slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.random_engine import random_specs
from loraplex.core.errors import AdapterError
from loraplex.engine.adapter_loader import AdapterLoader, slab_weights
from loraplex.engine.adapter_reads import AdapterReads, slab_key
from loraplex.engine.peers import ComesLaterError
from loraplex.kernels.lora import LoraWeights
from loraplex.model.shapes import config_of_shape
from loraplex.server.pool.offers import Offers
from loraplex.server.pool.replica_pool import ReplicaPool

SHAPE = config_of_shape("tiny").shape
FIRST, SECOND = random_specs("a", "tiny", num_adapters=2, ranks=(3,), modules="q,k,v,gate")
LAYOUT = slab_layout(FIRST, SHAPE)


def fill(spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
    slab[:] = 7.0


def test_gaps_and_matrices_make_up_the_slab() -> None:
    layout = slab_layout(FIRST, replace(SHAPE, hidden_size=60, head_dim=10))  # nothing is aligned by itself
    assert any(slab_gaps(layout))
    covered = np.zeros(layout.num_elements, dtype=np.int64)
    for begin, end in slab_gaps(layout):
        covered[begin:end] += 1
    for slots in (slots for groups in layout.layers for slots in groups.values()):
        for slot in slots:
            covered[slot.a_start : slot.a_start + slot.lora.rank * slot.in_features] += 1
            covered[slot.b_start : slot.b_start + slot.lora.rank * slot.out_features] += 1
    assert (covered == 1).all()


def test_a_single_engine_reads_files_and_offers_nothing() -> None:
    pool = ReplicaPool()
    reads = AdapterReads(fill, pool)
    reads.keep(FIRST, LAYOUT, torch.empty(LAYOUT.num_elements))
    assert reads.counts == (1, 0, 0, 0)
    assert pool._offers.find(slab_key(FIRST, LAYOUT, torch.float32)) is None


def test_slabs_of_another_type_or_version_are_others() -> None:
    keys = {
        slab_key(spec, LAYOUT, dtype) for spec in (FIRST, SECOND) for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(keys) == 4


class Peer(ReplicaPool):
    """Has what a test says, and remembers what is offered to others."""

    is_joined = True

    def __init__(self, digest: bytes | None = None) -> None:
        super().__init__()
        self.digest = digest
        self.offers: Offers = self._offers

    def fetch(self, key, target) -> bytes | None:
        target[:] = 1
        return self.digest


def test_a_slab_that_is_kept_is_offered_and_one_that_passes_is_not() -> None:
    peer = Peer()
    reads, key = AdapterReads(fill, peer), slab_key(FIRST, LAYOUT, torch.float32)
    reads.read(FIRST, LAYOUT, torch.empty(LAYOUT.num_elements))
    assert peer.offers.find(key) is None
    slab = torch.empty(LAYOUT.num_elements)
    reads.keep(FIRST, LAYOUT, slab)
    offer = peer.offers.find(key)
    assert offer is not None
    assert offer.digest is None
    reads.keep(SECOND, LAYOUT, slab[: LAYOUT.num_elements])
    assert peer.offers.find(key) is None, "its memory holds another one"
    reads.forget(SECOND.version)
    assert peer.offers.find(slab_key(SECOND, LAYOUT, torch.float32)) is None
    assert reads.counts == (3, 0, 0, 0)


def test_what_is_copied_is_offered_with_the_hash_it_was_verified_by() -> None:
    peer = Peer(b"digest")
    reads = AdapterReads(fill, peer)
    reads.keep(FIRST, LAYOUT, torch.empty(LAYOUT.num_elements))
    offer = peer.offers.find(slab_key(FIRST, LAYOUT, torch.float32))
    assert offer is not None
    assert offer.digest == b"digest"
    assert reads.counts == (0, 1, 4 * LAYOUT.num_elements, 0)


def test_a_read_that_fails_is_neither_offered_nor_on_its_way() -> None:
    def fail(spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        assert peer.offers.is_coming(key)
        raise AdapterError("its file is cut short")

    peer, key = Peer(), slab_key(FIRST, LAYOUT, torch.float32)
    with pytest.raises(AdapterError, match="cut short"):
        AdapterReads(fail, peer).keep(FIRST, LAYOUT, torch.empty(LAYOUT.num_elements))
    assert peer.offers.find(key) is None
    assert not peer.offers.is_coming(key)


def test_a_load_that_waits_for_another_replica_lets_others_pass() -> None:
    has_come = threading.Event()

    def load(spec: AdapterSpec) -> LoraWeights:
        if spec is FIRST and not has_come.is_set():
            raise ComesLaterError
        has_come.set()  # only when the other one has had its turn
        layout = slab_layout(spec, SHAPE)
        return slab_weights(torch.zeros(layout.num_elements), layout, spec.max_rank)

    loader = AdapterLoader(num_threads=1)
    for spec in (FIRST, SECOND):
        loader.submit([spec], load)
    ended: list[str] = []
    while loader.num_pending:
        ended += [result.version for result in loader.poll(1.0) if result.error is None]
    loader.close()
    assert ended == [SECOND.version, FIRST.version]
