"""Which codec goes with which strategy: the table says what the strategies themselves say."""

import pytest

from instep.comm.codecs import CODECS
from instep.errors import SpecError
from instep.job import file as spec_file
from instep.job.sync.tables import STRATEGY_ROWS
from instep.sync import STRATEGIES
from instep.sync.base import make_strategy
from instep.sync.clashes import check


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_codec_is_refused_with_a_strategy_if_that_cannot_be_made_with_it(strategy, codec):
    rounds = {"participants": 2} if STRATEGY_ROWS[strategy].rounds else {}
    job = {"recipe": "a.py:f", "sync": {"name": strategy, "codec": codec, **rounds}}
    try:
        make_strategy(strategy, {}, codec)
        made = True
    except SpecError:
        made = False
    if made:
        check(spec_file.build(job, source="a test"))
    else:
        with pytest.raises(SpecError, match=f"sync.codec = {codec!r}"):
            check(spec_file.build(job, source="a test"))
