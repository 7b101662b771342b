//! How `Group::estimate` (in `explain`) estimates the time of a call without making it: by a cost model that uses the
//! group's own measurements. Pure.
//!
//! Near the sizes of calls that the group has made, the estimate is the median time of these calls from issue to end.
//! Between and beyond these sizes, the model is scaled so that it passes through the medians. Without measurements, the
//! estimate is the model's time.

use crate::stats::Typical;

/// A model for the kinds of operations whose time `explain` does not predict: nanoseconds for an exchange, and
/// nanoseconds for each byte.
const EXCHANGE_NS: f64 = 1_000.0;
const BYTE_NS: f64 = 0.05;

/// Estimates from the payload alone how many nanoseconds an operation takes.
pub(super) fn by_bytes(payload: f64) -> f64 {
    EXCHANGE_NS + payload * BYTE_NS
}

/// Returns the model's time at `payload`, multiplied by the ratio of measured to modelled time at the nearest measured
/// sizes below and above.
pub(super) fn scaled(typical: &[Typical], model: impl Fn(f64) -> f64, payload: f64) -> f64 {
    let ratio = |at: &Typical| at.nanoseconds / model(at.payload);
    let above = typical.iter().position(|at| at.payload >= payload);
    let factor = match above {
        _ if typical.is_empty() => 1.0,
        None => ratio(&typical[typical.len() - 1]),
        Some(0) => ratio(&typical[0]),
        Some(above) => {
            let (low, high) = (&typical[above - 1], &typical[above]);
            let log = |bytes: f64| (bytes + 1.0).ln();
            let way = (log(payload) - log(low.payload)) / (log(high.payload) - log(low.payload));
            ratio(low).powf(1.0 - way) * ratio(high).powf(way)
        }
    };
    model(payload) * factor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_passes_through_what_was_measured() {
        let model = |payload: f64| 1000.0 + payload;
        assert_eq!(scaled(&[], model, 500.0), 1500.0);
        let typical = [(0.0, 2000.0), (9000.0, 50_000.0), (99_000.0, 100_000.0)]
            .map(|(payload, nanoseconds)| Typical { payload, nanoseconds, calls: 5 });
        for at in typical {
            assert!((scaled(&typical, model, at.payload) - at.nanoseconds).abs() < 1e-6);
        }
        assert_eq!(scaled(&typical, model, 199_000.0), 200_000.0, "beyond them in proportion to the model");
        let between = scaled(&typical, model, 50_000.0);
        assert!((51_000.0..5.0 * 51_000.0).contains(&between), "{between}");
        assert!(scaled(&typical[1..], model, 0.0) == 5000.0);
    }
}
