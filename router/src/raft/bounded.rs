//! Taking items up to an amount of bytes. Not here: which amount; each caller names its own limit.

/// The first items whose sizes add up to at most `limit` bytes, and the first one in any case, so that
/// an item above the limit still moves.
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
