//! A little statistics.

pub(super) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0usize), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

/// Population standard deviation.
pub(super) fn deviation(values: &[f64]) -> f64 {
    let centre = mean(values.iter().copied()).unwrap_or(0.0);
    mean(values.iter().map(|value| (value - centre).powi(2))).unwrap_or(0.0).sqrt()
}

/// The smallest value that a share of all values does not exceed.
pub(super) fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// `P(good > bad) + P(good = bad)/2` over all pairs.
pub(super) fn auc(good: &[f64], bad: &[f64]) -> Option<f64> {
    let win = |(g, b): (f64, f64)| if g > b { 1.0 } else { f64::from(u8::from(g == b)) / 2.0 };
    mean(good.iter().flat_map(|&g| bad.iter().map(move |&b| (g, b))).map(win))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples() {
        assert_eq!(auc(&[2.0, 3.0], &[1.0, 0.0]), Some(1.0));
        assert_eq!(auc(&[1.0], &[1.0, 2.0, 0.0]), Some(0.5));
        assert_eq!(auc(&[], &[1.0]), None);
        let of = |share| quantile(&[3.0, 1.0, 2.0], share);
        assert_eq!((of(0.5), of(0.95), quantile(&[], 0.5)), (Some(2.0), Some(3.0), None));
        assert_eq!(deviation(&[1.0, 3.0]), 1.0);
    }
}
