//! Nodes' reuse statistics by category, to and from the wire.
//!
//! Sums travel in single precision, with a relative error of about 1e-7. Not here: their meaning
//! (`kv_core::evict::statistics`).

use kv_core::evict::reuse_stats::{AGE_BANDS, CategorySums, InvalidStats, ReuseStats, STATS_FORMAT};

use super::ConvertError;
use crate::pb;

/// Writes statistics: at most [`kv_core::evict::reuse_stats::CATEGORIES_MAX`] categories of 700 bytes.
#[must_use]
pub fn statistics_to_pb(statistics: &ReuseStats) -> pb::Statistics {
    let categories = statistics.categories().map(|(category, sums)| pb::CategorySums {
        category: category.into(),
        uses: sums.uses as f32,
        reuses: ages_to_pb(&sums.reuses),
        exposure_s: ages_to_pb(&sums.exposure_s),
        cluster_blocks: sums.clusters.0 as f32,
        cluster_squares: sums.clusters.1 as f32,
    });
    pb::Statistics { form: STATS_FORMAT, categories: categories.collect() }
}

fn ages_to_pb(ages: &[f64; AGE_BANDS]) -> Vec<f32> {
    let last = ages.iter().rposition(|sum| *sum > 0.0).map_or(0, |last| last + 1);
    ages[..last].iter().map(|&sum| sum as f32).collect()
}

/// Reads statistics.
///
/// # Errors
/// When they have another format version, or impossible values.
pub fn statistics_from_pb(statistics: &pb::Statistics) -> Result<ReuseStats, ConvertError> {
    if statistics.form != STATS_FORMAT {
        return Err(ConvertError::Unknown { field: "statistics.form", number: statistics.form });
    }
    let mut all = ReuseStats::default();
    for sums in &statistics.categories {
        let ages = |sums: &[f32]| -> Option<[f64; AGE_BANDS]> {
            (sums.len() <= AGE_BANDS)
                .then(|| std::array::from_fn(|age| sums.get(age).map_or(0.0, |sum| f64::from(*sum))))
        };
        let category = u16::try_from(sums.category).unwrap_or(u16::MAX);
        let unsound = || InvalidStats::TooManyAges { category };
        let told = CategorySums {
            uses: sums.uses.into(),
            reuses: ages(&sums.reuses).ok_or_else(unsound)?,
            exposure_s: ages(&sums.exposure_s).ok_or_else(unsound)?,
            clusters: (sums.cluster_blocks.into(), sums.cluster_squares.into()),
        };
        all.add_reported(sums.category, told)?;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::evict::reuse_stats::{CATEGORIES_MAX, CategoryRole, SUM_MAX};
    use kvfleet_errors_doc::says;
    use prost::Message;

    use super::*;

    fn full_statistics() -> ReuseStats {
        let sums = CategorySums {
            uses: SUM_MAX / 2.0,
            reuses: [3.5; AGE_BANDS],
            exposure_s: [0.1; AGE_BANDS],
            clusters: (7.0, 9.0),
        };
        let mut all = ReuseStats::default();
        (0..CATEGORIES_MAX as u16)
            .for_each(|number| all.add(CategoryRole::from_number(number).unwrap(), &sums));
        all
    }

    #[test]
    fn statistics_round_trip_within_single_precision() {
        let mut sums = CategorySums { uses: 1.0, clusters: (1.0 / 3.0, 1e3), ..CategorySums::default() };
        (sums.reuses[4], sums.exposure_s[AGE_BANDS - 1]) = (1e12 / 7.0, 0.3);
        let mut one = ReuseStats::default();
        one.add(CategoryRole::Partial, &sums);
        for all in [one, full_statistics(), ReuseStats::default()] {
            let wire = statistics_to_pb(&all);
            assert!(wire.encoded_len() <= 700 * CATEGORIES_MAX + 8, "{}", wire.encoded_len());
            let back = statistics_from_pb(&wire).unwrap();
            assert!(all.distance(&back) < 1e-6);
            // A second round trip changes no value.
            assert_eq!(statistics_to_pb(&back), wire);
        }
    }

    #[test]
    fn rejects_impossible_statistics() {
        let good = statistics_to_pb(&full_statistics());
        let refusal = |spoil: &dyn Fn(&mut pb::Statistics)| {
            let mut bad = good.clone();
            spoil(&mut bad);
            statistics_from_pb(&bad).unwrap_err().to_string()
        };
        says("statistics of another form", &refusal(&|all| all.form = STATS_FORMAT + 1), &[]);
        says(
            "statistics with a sum that is no number",
            &refusal(&|all| all.categories[2].uses = f32::NAN),
            &[],
        );
        for sum in [f32::INFINITY, -1.0, 1e30, f32::NEG_INFINITY] {
            says(
                "statistics with a sum that cannot be",
                &refusal(&|all| all.categories[2].reuses[7] = sum),
                &[],
            );
            says(
                "statistics with a sum that cannot be",
                &refusal(&|all| all.categories[2].cluster_squares = sum),
                &[],
            );
        }
        for (sum, squares) in [(7.0, 6.9), (0.0, 1.0), (1.0, 1e17)] {
            says(
                "statistics of clusters that cannot be",
                &refusal(&|all| {
                    (all.categories[2].cluster_blocks, all.categories[2].cluster_squares) = (sum, squares);
                }),
                &[],
            );
        }
        says(
            "statistics of a category that is none",
            &refusal(&|all| all.categories[2].category = 70_000),
            &[],
        );
        says(
            "statistics of more categories than there are",
            &refusal(&|all| all.categories.push(all.categories[0].clone())),
            &[],
        );
        says(
            "statistics of more ages than there are",
            &refusal(&|all| all.categories[2].exposure_s.push(0.0)),
            &[],
        );
    }
}
