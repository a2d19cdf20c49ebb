"""The measurement of alerts in small: one scope of each service."""

import pytest

from benchmarks import alerts


@pytest.mark.skipif(
    not all((alerts.DATA / f"azure_llm_2023_{name}.csv").exists() for name in alerts.SERVICES),
    reason=f"the Azure traces of 2023 are not in {alerts.DATA}",
)
def test_spikes_are_found_within_an_hour_and_few_alarms_are_false() -> None:
    outcomes = alerts.total(
        [each for group in alerts.run(alerts.DATA, 1, 30, rates=(1000,)).values() for each in group]
    )
    assert outcomes.spikes == 60
    assert outcomes.found >= 0.9 * outcomes.spikes
    assert outcomes.false_alarms <= outcomes.scope_weeks
    assert all(0 < delay <= 60 for delay in outcomes.delays)
