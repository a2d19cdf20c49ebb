"""What was said: bodies of requests and answers, of keys whose payloads are recorded; in partitions by day."""

from sqlalchemy import BigInteger, CheckConstraint, Column, LargeBinary, Table, Uuid

from billing.tables.base import metadata

payload = Table(
    "payload",
    metadata,
    Column("operation_id", Uuid, primary_key=True),
    Column("request", LargeBinary, nullable=False, comment="its first bytes; all, where they are request_bytes"),
    Column("request_bytes", BigInteger, nullable=False, comment="of the whole request"),
    Column("answer", LargeBinary, nullable=False, comment="likewise; of a stream, its events as they were sent"),
    Column("answer_bytes", BigInteger, nullable=False),
    CheckConstraint("octet_length(request) <= request_bytes", name="request_is_its_start"),
    CheckConstraint("octet_length(answer) <= answer_bytes", name="answer_is_its_start"),
    postgresql_partition_by="RANGE (operation_id)",
)
