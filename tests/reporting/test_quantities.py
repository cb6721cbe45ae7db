"""Names, units and directions of quantities; the interval over clients."""

import pytest

from fedrema.errors import BadInput
from fedrema.reporting.quantities import (
    Quantity,
    explanation,
    find_quantity,
    metric_text,
    number,
    signed_number,
    with_unit,
)
from fedrema.reporting.statistics import rank
from fedrema.tasks import METRICS

RMSE, ACCURACY, AUC = METRICS["rmse"], METRICS["accuracy"], METRICS["auc"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.51234, "0.512"), (0.5, "0.500"), (12.34, "12.3"), (999.7, "1000"), (12345.6, "12346"), (0, "0"),
     (123, "123"), (0.00001234, "1.23e-05"), (2.5e7, "2.50e+07"), (-1.5, "-1.50")],
)  # fmt: skip
def test_three_significant_digits(value, text):
    assert number(value) == text


def test_units():
    assert metric_text(ACCURACY, 0.8123, 0.0123) == "81.2 ± 1.2"
    assert metric_text(RMSE, 0.8123, 0.0123) == "0.812 ± 0.012"
    assert metric_text(RMSE, 1234.5, 12.3) == "1234 ± 12"
    assert (with_unit(ACCURACY, 0.5), with_unit(RMSE, 0.5)) == ("50.0 %", "0.500")
    assert (signed_number(0.25), signed_number(-0.25)) == ("+0.250", "-0.250")


def test_a_quantity_is_that_of_the_primary_metric_unless_it_names_another():
    assert find_quantity("honest", "rmse") == Quantity("honest", RMSE)
    assert find_quantity("honest_rmse", "rmse").name == "honest_rmse"
    assert find_quantity("worst_tenth", "rmse").name == "worst_tenth"
    other = find_quantity("worst_tenth_auc", "accuracy")
    assert (other.name, other.words) == ("worst_tenth_auc", "worst tenth by AUC")
    assert find_quantity("best_balanced_accuracy", "accuracy").metric is METRICS["balanced_accuracy"]
    for name in ("speed", "honestly", "honest_speed", "rmse"):
        with pytest.raises(BadInput, match=f"--quantity '{name}' is unknown; valid are honest, best, final, worst_t"):
            find_quantity(name, "rmse")


def test_direction():
    lower, higher = Quantity("best", RMSE), Quantity("best", AUC)
    assert (lower.best([3, 1, 2]), higher.best([3, 1, 2])) == (1, 3)
    assert (lower.difference_unit, higher.difference_unit) == ("negative is better", "percentage points")
    assert (lower.signed(-0.5), higher.signed(-0.5)) == ("-0.500", "-50.0")


def test_explanations():
    assert explanation([ACCURACY]) == (
        "Accuracy in percent, mean ± standard deviation over seeds. best: the round is chosen by the samples that score"
        " it; honest: by the other half of them; final: mean of the last 5 evaluated rounds; worst tenth: final, of the"
        " tenth of the clients with the lowest accuracy."
    )
    text = explanation([RMSE, METRICS["r2"], METRICS["mae"]])
    assert text.startswith("RMSE, lower is better, mean ± standard deviation over seeds.")
    assert text.endswith("clients with the highest RMSE. Also final: R², MAE (lower is better).")


def test_lower_scores_can_rank_first():
    table = {row: {("c", seed): value + seed for seed in range(4)} for row, value in zip("abc", (1, 2, 3), strict=True)}
    assert rank(table).names == ("c", "b", "a")
    assert rank(table, higher_is_better=False).names == ("a", "b", "c")
