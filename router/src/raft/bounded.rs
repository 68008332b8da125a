//! Takes items up to a total size in bytes. Not here: the limits, which each caller names.

/// The first items with a total size of at most `limit` bytes. The first item is always included,
/// so that one above the limit still moves.
pub(crate) fn take_bytes<T>(
    items: impl Iterator<Item = T>,
    limit: u64,
    size: impl Fn(&T) -> u64,
) -> impl Iterator<Item = T> {
    let mut taken = 0u64;
    let mut first = true;
    items.take_while(move |item| {
        taken = taken.saturating_add(size(item));
        std::mem::take(&mut first) || taken <= limit
    })
}

#[cfg(test)]
mod tests {
    use super::take_bytes;

    fn taken(sizes: &[u64], limit: u64) -> usize {
        take_bytes(sizes.iter(), limit, |size| **size).count()
    }

    #[test]
    fn stops_before_the_limit_is_passed() {
        assert_eq!(taken(&[4, 4, 4], 8), 2);
        assert_eq!(taken(&[4, 4, 4], 11), 2);
        assert_eq!(taken(&[4, 4, 4], 12), 3);
    }

    #[test]
    fn one_item_always_goes() {
        assert_eq!(taken(&[100, 1], 8), 1);
        assert_eq!(taken(&[], 8), 0);
    }
}
