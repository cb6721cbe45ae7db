"""Training speed on this machine: our backends, compared with a textbook loop and the machine's peak rates."""

from fedrema.bench.ceilings import Ceilings
from fedrema.bench.report import Report
from fedrema.bench.timing import Measured, Row, Workload, measure

__all__ = ["Ceilings", "Measured", "Report", "Row", "Workload", "measure"]
