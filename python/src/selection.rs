//! Buckets on other devices: what was selected comes in, and of the average what is not 0 goes out.

use crate::bucket::check_layer;
use crate::buffers::{Floats, Format};
use crate::refused;
use adacomp::internal::Output;
use adacomp::{Layout, Selected, Treatment};
use adacomp_exchange::GroupAverage;
use pyo3::prelude::*;
use std::ops::Range;

/// Where a layer of a bucket is.
struct Place {
    layer: usize,
    /// Its bins, if it is compressed.
    bins: Option<Range<usize>>,
    /// Its elements among those of the bucket's compressed layers, or among those of its dense ones.
    elements: Range<usize>,
    /// The index in the bucket of its first element.
    start: usize,
}

/// The layers of a bucket, in its order.
pub(crate) struct Places {
    places: Vec<Place>,
    bins: usize,
    compressed: usize,
    dense: usize,
}

impl Places {
    pub(crate) fn new(layout: &Layout, layers: &[usize]) -> PyResult<Self> {
        let mut all = Self { places: Vec::with_capacity(layers.len()), bins: 0, compressed: 0, dense: 0 };
        for &layer in layers {
            check_layer(layout, layer)?;
            let (elements, start) = (layout[layer].elements(), all.compressed + all.dense);
            let (bins, end) = match layout[layer].treatment {
                Treatment::Bins(bin) => {
                    let first = all.bins;
                    all.bins += elements.div_ceil(bin as usize);
                    (Some(first..all.bins), &mut all.compressed)
                }
                _ => (None, &mut all.dense),
            };
            *end += elements;
            all.places.push(Place { layer, bins, elements: *end - elements..*end, start });
        }
        // A word has an index and a sign.
        if all.compressed + all.dense > i32::MAX as usize / 2 {
            return Err(refused("a bucket of more than 2^30 elements; use a smaller bucket_cap_mb"));
        }
        Ok(all)
    }

    /// Returns the layers in ascending order, as groups have them.
    pub(crate) fn layers(&self) -> Vec<usize> {
        let mut layers: Vec<usize> = self.places.iter().map(|place| place.layer).collect();
        layers.sort();
        layers
    }

    fn compressed(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().filter(|place| place.bins.is_some())
    }
}

/// What another device has selected of a bucket.
pub(crate) struct Selection {
    pub(crate) places: Places,
    /// For each selected element twice its index among the compressed layers' elements, plus one if it is negative.
    pub(crate) words: Vec<i32>,
    pub(crate) maxima: Vec<f32>,
    /// The gradients of the dense layers, one after the other.
    pub(crate) dense: Floats,
}

impl Selection {
    pub(crate) fn check(&self) -> PyResult<()> {
        let Places { bins, compressed, dense, .. } = self.places;
        let ascend = self.words.is_sorted_by(|one, next| one >> 1 < next >> 1);
        let last = self.words.last().map_or(0, |word| *word as usize >> 1);
        if !ascend || self.words.first().is_some_and(|word| *word < 0) || last >= compressed.max(1) {
            return Err(refused(format!("selected elements that do not ascend, or not below {compressed}")));
        }
        for (what, actual, expected) in
            [("bin maxima", self.maxima.len(), bins), ("dense values", self.dense.len(), dense)]
        {
            if actual != expected {
                return Err(refused(format!("{actual} {what} of a bucket, expected {expected}")));
            }
        }
        Ok(())
    }

    /// Submits all layers of the bucket.
    pub(crate) fn submit<E>(
        &self,
        mut compressed: impl FnMut(usize, &[f32], &[Selected]) -> Result<(), E>,
        mut dense: impl FnMut(usize, adacomp::Gradient<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut rest, mut selected) = (self.words.as_slice(), Vec::new());
        for Place { layer, bins, elements, .. } in &self.places.places {
            let Some(bins) = bins else {
                dense(*layer, self.dense.gradient(elements.clone()))?;
                continue;
            };
            let count = rest.partition_point(|word| (*word as usize >> 1) < elements.end);
            let (words, after) = rest.split_at(count);
            rest = after;
            selected.clear();
            let first = elements.start as u32;
            selected
                .extend(words.iter().map(|word| Selected::new((*word as u32 >> 1) - first, word & 1 == 1)));
            compressed(*layer, &self.maxima[bins.clone()], &selected)?;
        }
        Ok(())
    }
}

/// The average of a bucket as a device takes it.
pub(crate) struct Average {
    pub(crate) places: Places,
    format: Format,
    /// Of each element that is not 0 the bits of its value, then its index in the bucket.
    elements: Vec<u64>,
    dense: Vec<f32>,
}

impl Average {
    pub(crate) fn new(places: Places, format: &str) -> PyResult<Self> {
        Ok(Self { places, format: Format::named(format)?, elements: Vec::new(), dense: Vec::new() })
    }

    /// Returns whether what is written always fits.
    pub(crate) fn is_f32(&self) -> bool {
        self.format == Format::F32
    }

    /// Takes the average of the bucket's group. Returns whether it fits the bucket's format.
    pub(crate) fn write(&mut self, average: GroupAverage<'_>, loss_scale: f32) -> bool {
        let Self { places, format, elements, dense } = self;
        dense.resize(places.dense, 0.0);
        let mut entries: Vec<Vec<(u32, f32)>> = vec![Vec::new(); places.compressed().count()];
        let (mut rest, mut next) = (dense.as_mut_slice(), entries.iter_mut());
        let mut outputs: Vec<(usize, Output<'_>)> = Vec::with_capacity(places.places.len());
        for Place { layer, bins, elements, .. } in &places.places {
            let output = match (bins, &mut next) {
                (Some(_), next) => Output::Sparse {
                    elements: elements.len(),
                    entries: next.next().expect("one for each compressed layer"),
                },
                (None, _) => {
                    let (slice, after) = rest.split_at_mut(elements.len());
                    rest = after;
                    Output::Dense(slice)
                }
            };
            outputs.push((*layer, output));
        }
        outputs.sort_by_key(|(layer, _)| *layer);
        average.write_to(&mut outputs.into_iter().map(|(_, output)| output).collect::<Vec<_>>());

        dense.iter_mut().for_each(|value| *value *= loss_scale);
        let mut fits = dense.iter().all(|value| format.fits(*value));
        for (place, entries) in places.compressed().zip(&entries) {
            elements.extend(entries.iter().map(|(index, value)| {
                let value = value * loss_scale;
                fits &= format.fits(value);
                u64::from(value.to_bits()) << 32 | (place.start + *index as usize) as u64
            }));
        }
        fits
    }

    /// Returns words of 32 bits for the device, and how many indices and values they have: the index of each element in the
    /// bucket, by value; the values; how many elements have each of them; the scale of each compressed layer and the number of
    /// elements that it has sent; and the dense layers' averages in the bucket's format.
    ///
    /// An average of few learners has few values, so they take next to nothing. Where there are many, each element has its own,
    /// and there are no counts.
    pub(crate) fn words(mut self, sent: impl Fn(usize) -> (f32, usize)) -> (Vec<u32>, usize, usize) {
        self.elements.sort_unstable();
        let mut words: Vec<u32> = self.elements.iter().map(|element| *element as u32).collect();
        let indices = words.len();
        let groups = || self.elements.chunk_by(|one, next| one >> 32 == next >> 32);
        let mut values = groups().count();
        if 2 * values < indices {
            words.extend(groups().map(|group| (group[0] >> 32) as u32));
            words.extend(groups().map(|group| group.len() as u32));
        } else {
            words.extend(self.elements.iter().map(|element| (element >> 32) as u32));
            values = indices;
        }
        let layers: Vec<(f32, usize)> = self.places.compressed().map(|place| sent(place.layer)).collect();
        words.extend(layers.iter().map(|(scale, _)| scale.to_bits()));
        words.extend(layers.iter().map(|(_, count)| *count as u32));
        words.extend(self.format.words(&self.dense));
        (words, indices, values)
    }
}

/// Checks that these are the groups of a step, in order.
pub(crate) fn check_groups<'a>(
    groups: impl Iterator<Item = &'a [usize]>,
    given: impl Iterator<Item = Vec<usize>>,
) -> PyResult<()> {
    if groups.eq(given) { Ok(()) } else { Err(refused("not all buckets of the step, as they were given")) }
}
