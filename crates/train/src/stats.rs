//! Means and deviations.

/// Mean; 0 of nothing.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / f64::from(count) }
}

/// Population standard deviation.
pub(crate) fn std_of(values: &[f64]) -> f64 {
    let mean_value = mean(values.iter().copied());
    mean(values.iter().map(|v| (v - mean_value).powi(2))).sqrt()
}
