"""How fast this machine trains: our backends beside a textbook loop and beside what the machine can do at most."""

from fedrema.bench.ceilings import Ceilings
from fedrema.bench.report import Report
from fedrema.bench.timing import Measured, Row, Workload, measure

__all__ = ["Ceilings", "Measured", "Report", "Row", "Workload", "measure"]
