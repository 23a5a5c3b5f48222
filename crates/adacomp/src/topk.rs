//! The comparison scheme of Dryden et al. (2016): the largest elements of a tensor, sent as two means.

use crate::packet::Selected;

/// Selects the largest `percent` by magnitude, at least one element; of equals the first. The means of the positive and
/// of the negative ones.
pub(crate) fn select(
    g: &[f32],
    percent: f32,
    magnitudes: &mut Vec<u32>,
    selected: &mut Vec<Selected>,
) -> [f32; 2] {
    if g.is_empty() {
        return [0.0; 2];
    }
    let count = ((g.len() as f64 * f64::from(percent) / 100.0).ceil() as usize).clamp(1, g.len());
    magnitudes.clear();
    // The bits of positive floats order like the floats, and integers order faster.
    magnitudes.extend(g.iter().map(|g| g.abs().to_bits()));
    let (_, &mut threshold, above) = magnitudes.select_nth_unstable(g.len() - count);
    let mut equals = count - above.iter().filter(|&&magnitude| magnitude > threshold).count();

    let mut sums = [0.0f64; 2];
    let mut counts = [0u32; 2];
    for (index, &value) in g.iter().enumerate() {
        let magnitude = value.abs().to_bits();
        if magnitude < threshold || magnitude == 0 {
            continue;
        }
        if magnitude == threshold {
            if equals == 0 {
                continue;
            }
            equals -= 1;
        }
        let element = Selected::new(index as u32, value < 0.0);
        sums[element.sign()] += f64::from(value);
        counts[element.sign()] += 1;
        selected.push(element);
    }
    [0, 1].map(|sign| if counts[sign] == 0 { 0.0 } else { (sums[sign] / f64::from(counts[sign])) as f32 })
}
