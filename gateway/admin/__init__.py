"""The admin API under `/admin/v1`: thin routes over what billing can do, one file a noun."""
