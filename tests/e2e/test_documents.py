"""Workers die while they write JSON: the documents are the same to the byte as without a death, and valid."""

import argparse

import pytest

from tests.chaos.documents import measure


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_documents_survive_their_workers() -> None:
    result = await measure(argparse.Namespace(kills=4, minutes=2.0, schemas=14, workers=2, seed=5))
    assert result["kills"] >= 4
    assert result["documents_being_written_at_a_kill"] >= 4
    assert (result["different"], result["not_valid"]) == (0, 0)
