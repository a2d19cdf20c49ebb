"""What is long over is forgotten, so that the alerts' tables stay as small as what is looked at."""

from datetime import timedelta

from sqlalchemy import delete, func
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.audit import act_as
from billing.tables import alert, alert_delivery, alert_silence

KEPT = timedelta(days=90)
"""How long an alert is kept after it resolved, with what was told of it; a test message and a silence likewise."""


async def forget_old(engine: AsyncEngine) -> None:
    """Delete what ended more than KEPT ago; a job of housekeeping. What is open or waits stays."""
    async with engine.begin() as conn:
        await act_as(conn, "gateway")
        before = func.now() - KEPT
        await conn.execute(delete(alert).where(alert.c.resolved_at < before))  # its deliveries go with it
        tests = alert_delivery.c.alert_id.is_(None)
        await conn.execute(delete(alert_delivery).where(tests, alert_delivery.c.ended_at < before))
        await conn.execute(delete(alert_silence).where(alert_silence.c.until < before))
