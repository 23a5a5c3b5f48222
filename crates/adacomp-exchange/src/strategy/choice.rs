//! The default strategy, chosen by the bytes that each would send: estimated from the layout, before anything is run.

use super::Strategy;
use adacomp::{Codec, Layer, Layout, Treatment, UnknownName};
use std::fmt;
use std::str::FromStr;

/// A strategy, or the choice of one by the number of learners and the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StrategyChoice {
    /// The one that [`Strategy::choose`] returns.
    #[default]
    Auto,
    /// This one.
    Given(Strategy),
}

impl StrategyChoice {
    /// Returns the strategy. It follows from what all learners have in common, so all get the same.
    pub fn resolve(self, layout: &Layout, learners: usize, codec: Codec) -> Strategy {
        match self {
            Self::Auto => Strategy::choose(layout, learners, codec),
            Self::Given(strategy) => strategy,
        }
    }
}

impl fmt::Display for StrategyChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => formatter.pad("auto"),
            Self::Given(strategy) => strategy.fmt(formatter),
        }
    }
}

impl FromStr for StrategyChoice {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let all = Strategy::ALL.map(Self::Given);
        let all = [Self::Auto].into_iter().chain(all);
        UnknownName::find(name, "strategy", "auto, dense, gather, reduce or sharded", all)
    }
}

/// Elements of a bin that are selected, the paper's number. In training it is 2 to 9, and the choice hardly depends on it.
const SELECTED: f64 = 5.0;

/// Bits that a selected element takes on top of the entropy of its position: its sign, and what codes lose.
const EXTRA_BITS: f64 = 2.4;

/// Bytes around the contents of a message: its envelope, and what a transport adds.
const MESSAGE: f64 = 15.0;

/// Elements that are exchanged together, PyTorch's 25 MB.
const GROUP: f64 = 6.5e6;

impl Strategy {
    /// Returns the one of `gather` and `reduce` by which a learner sends fewer bytes, as far as the layout and the number of
    /// learners tell. Neither `sharded`, in which values wait twice, nor `dense` is chosen. The paper's codec is one of
    /// frames, and so are top-k's means: these are gathered.
    pub fn choose(layout: &Layout, learners: usize, codec: Codec) -> Self {
        let bytes = |strategy: Self| strategy.expected_bytes(layout, learners, usual_density);
        match codec {
            Codec::Rice
                if Self::Reduce.check(layout).is_ok() && bytes(Self::Reduce) < bytes(Self::Gather) =>
            {
                Self::Reduce
            }
            _ => Self::Gather,
        }
    }

    /// Returns about how many bytes a learner sends in a step, and as many come to it, if `density` returns the share of a
    /// layer's elements that a learner selects.
    pub fn expected_bytes(self, layout: &Layout, learners: usize, density: impl Fn(&Layer) -> f64) -> f64 {
        let learners = learners as f64;
        let others = learners - 1.0;
        let groups = (layout.elements() as f64 / GROUP).ceil();
        // To each other learner, whatever is selected: messages of each round, and the verdict.
        let messages = |rounds: f64| MESSAGE * (1.0 + rounds * groups);
        let sum = |layer: &dyn Fn(&Layer) -> f64| layout.layers().iter().map(layer).sum::<f64>();
        let elements = |layer: &Layer| layer.elements() as f64;
        // What one learner selects of a layer and what all do, in bytes, and the bytes of a layer that is sent dense.
        let signs = |layer: &Layer| elements(layer) * bits_of_signs(density(layer)) / 8.0;
        let sums = |layer: &Layer| {
            let density = density(layer);
            signs(layer) * (entropy_of_sum(learners * density) / entropy_of_sum(density)).max(1.0)
        };
        let selects = |layer: &Layer| layer.treatment.selects();
        let both_ways = 2.0 * others / learners;
        match self {
            Self::Dense => both_ways * 4.0 * layout.elements() as f64,
            Self::Gather => {
                let section = |layer: &Layer| match layer.treatment {
                    Treatment::Dense => 4.0 + 4.0 * elements(layer),
                    Treatment::Half => 4.0 + 2.0 * elements(layer),
                    // Its scale, how many there are, and the parameter of their code.
                    Treatment::Bins(_) | Treatment::TopK(_) => 4.0 + 7.0 + signs(layer),
                };
                others * (messages(1.0) + sum(&section))
            }
            Self::Reduce => {
                let layer = |layer: &Layer| match selects(layer) {
                    // Scale, number of signs, and numbers of each level of sums, for each other learner.
                    true => 10.0 * others + both_ways / 2.0 * (signs(layer) + sums(layer)),
                    false => both_ways * 4.0 * elements(layer),
                };
                others * messages(3.0) + sum(&layer)
            }
            Self::Sharded => {
                let owners = 1.0 + owners_select(learners as usize);
                let layer = |layer: &Layer| match selects(layer) {
                    true => 12.0 * others + both_ways / 2.0 * owners * signs(layer),
                    false => both_ways * 4.0 * elements(layer),
                };
                others * messages(2.0) + sum(&layer)
            }
        }
    }
}

/// Returns what owners select with `sharded`, in all shards, as a multiple of what one learner selects: averages of many learners
/// have more elements of about the same size. As measured, between 1.15 and 1.7 for two learners and 2 for many.
pub fn owners_select(learners: usize) -> f64 {
    (0.9 + 0.2 * learners as f64).min(2.0)
}

/// Returns the share of a layer's elements that a learner usually selects.
fn usual_density(layer: &Layer) -> f64 {
    match layer.treatment {
        Treatment::Bins(bin) => (SELECTED / f64::from(bin)).min(0.5),
        Treatment::TopK(percent) => f64::from(percent) / 100.0,
        Treatment::Dense | Treatment::Half => 1.0,
    }
}

/// Returns the bits that selected signs take for each element of a layer, if this share of it is selected.
fn bits_of_signs(density: f64) -> f64 {
    if density > 0.0 { density * ((1.0 / density).log2() + EXTRA_BITS) } else { 0.0 }
}

/// Returns the share of elements that is selected if signs take this number of bits for each element of a layer.
pub fn density_of_bits(bits: f64) -> f64 {
    let mut density: f64 = 0.01;
    for _ in 0..50 {
        density = (bits / ((1.0 / density).log2() + EXTRA_BITS)).clamp(1e-9, 0.5);
    }
    density
}

/// Returns the bits of the sum of random signs, of which there is this number on average.
fn entropy_of_sum(signs: f64) -> f64 {
    // From there on it is a bell curve.
    if signs > 30.0 {
        return 0.5 * (2.0 * std::f64::consts::PI * std::f64::consts::E * signs).log2();
    }
    let most = (signs + 12.0 * signs.sqrt() + 20.0) as usize;
    // How likely each sum is, by the number of signs: first for one sign less, then for one more.
    let mut chances = vec![0.0; 2 * most + 1];
    let mut given = vec![0.0; 2 * most + 3];
    given[most + 1] = 1.0;
    let mut poisson = (-signs).exp();
    for count in 0..=most {
        chances.iter_mut().zip(&given[1..]).for_each(|(chance, given)| *chance += poisson * given);
        poisson *= signs / (count + 1) as f64;
        let before = given.clone();
        for sum in 1..given.len() - 1 {
            given[sum] = 0.5 * (before[sum - 1] + before[sum + 1]);
        }
    }
    chances.iter().filter(|chance| **chance > 0.0).map(|chance| -chance * chance.log2()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use adacomp::{Kind, Parameter, Policy, Selected};

    fn layout(policy: &Policy, parameters: &[(&[usize], Kind)]) -> Layout {
        let parameter = |(number, &(shape, kind)): (usize, &(&[usize], Kind))| {
            Parameter::new(number.to_string(), shape).with_kind(kind)
        };
        policy.layout(parameters.iter().enumerate().map(parameter)).unwrap()
    }

    /// The layers of `mnist-cnn`, its vectors as one.
    const CNN: [(&[usize], Kind); 5] = [
        (&[32, 1, 5, 5], Kind::Conv),
        (&[64, 32, 5, 5], Kind::Conv),
        (&[1024, 128], Kind::Matrix),
        (&[128, 10], Kind::Matrix),
        (&[234], Kind::Vector),
    ];

    /// Bytes that were counted: of the traffic benchmark for a layer of a million elements, and of real training for the others
    /// (study `learners`, PyTorch), which select other shares than are expected.
    #[test]
    fn the_choice_is_the_one_that_was_measured_to_send_less() {
        let layer = layout(&Policy::adacomp(), &[(&[1000, 1000], Kind::Matrix)]);
        let cnn = layout(&Policy::adacomp(), &CNN);
        for (layout, learners, gather, reduce) in [
            (&layer, 2, 11_431.0, 15_865.0),
            (&layer, 8, 79_853.0, 62_086.0),
            (&layer, 32, 354_143.0, 156_315.0),
            (&layer, 128, 1_448_989.0, 295_551.0),
            (&cnn, 2, 7_897.0, 8_756.0),
            (&cnn, 8, 48_506.0, 20_469.0),
            (&cnn, 32, 192_773.0, 32_898.0),
            (&cnn, 128, 734_380.0, 53_656.0),
        ] {
            let better = if gather < reduce { Strategy::Gather } else { Strategy::Reduce };
            assert_eq!(Strategy::choose(layout, learners, Codec::Rice), better, "{learners}");
            let expected = |strategy: Strategy| strategy.expected_bytes(layout, learners, usual_density);
            for (strategy, measured) in [(Strategy::Gather, gather), (Strategy::Reduce, reduce)] {
                let ratio = expected(strategy) / measured;
                // In training less is selected, the more learners share a minibatch.
                assert!((0.9..1.7).contains(&ratio), "{strategy} {learners}: {ratio}");
                assert!(layout.len() > 1 || ratio < 1.1, "{strategy} {learners}: {ratio}");
            }
        }
    }

    /// Wherever the expectation is wrong, it is wrong for both: the choice is right, or hardly matters.
    #[test]
    fn the_choice_hardly_depends_on_how_much_is_selected() {
        for layout in
            [layout(&Policy::adacomp(), &[(&[1000, 1000], Kind::Matrix)]), layout(&Policy::adacomp(), &CNN)]
        {
            for learners in [2, 3, 4, 5, 6, 8, 16, 32, 64, 128] {
                let chosen = Strategy::choose(&layout, learners, Codec::Rice);
                for factor in [0.4, 0.7, 1.0, 1.4, 1.8] {
                    let density = |layer: &Layer| (factor * usual_density(layer)).min(0.5);
                    let bytes = |strategy: Strategy| strategy.expected_bytes(&layout, learners, density);
                    let best = bytes(Strategy::Gather).min(bytes(Strategy::Reduce));
                    assert!(bytes(chosen) <= 1.1 * best, "{learners} {factor}: {}", bytes(chosen) / best);
                }
            }
        }
    }

    #[test]
    fn what_only_frames_can_carry_is_gathered() {
        let shape: (&[usize], Kind) = (&[1000, 1000], Kind::Matrix);
        let choose = |policy: Policy, codec| Strategy::choose(&layout(&policy, &[shape]), 128, codec);
        assert_eq!(choose(Policy::adacomp(), Codec::Rice), Strategy::Reduce);
        assert_eq!(choose(Policy::adacomp(), Codec::Paper), Strategy::Gather);
        assert_eq!(choose(Policy::top_k(1.0), Codec::Rice), Strategy::Gather);
        assert_eq!(Strategy::choose(&layout(&Policy::adacomp(), &[shape]), 1, Codec::Rice), Strategy::Gather);
    }

    #[test]
    fn choices_are_read_as_they_are_written() {
        for choice in [StrategyChoice::Auto].into_iter().chain(Strategy::ALL.map(StrategyChoice::Given)) {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert!("ring".parse::<StrategyChoice>().is_err());
    }

    /// A number of bytes and the elements that are selected belong together as in the format on the wire.
    #[test]
    fn density_follows_from_bytes() {
        for selected in [0.002, 0.01, 0.05] {
            let elements = 1 << 20;
            let mut random = fastrand::Rng::with_seed(1);
            let chosen: Vec<u32> = (0..elements).filter(|_| random.f64() < selected).collect();
            let chosen: Vec<_> =
                chosen.into_iter().map(|index| Selected::new(index, random.bool())).collect();
            let mut bytes = Vec::new();
            adacomp::internal::encode_range(&chosen, 0..elements as usize, &mut bytes);
            let estimate = density_of_bits(8.0 * bytes.len() as f64 / f64::from(elements));
            assert!((estimate / selected - 1.0).abs() < 0.1, "{selected}: {estimate}");
        }
    }

    #[test]
    fn sums_grow_with_the_logarithm() {
        // One rare sign: its entropy. Many: a bell curve's, and both meet.
        let rare: f64 = 0.001;
        let exact = -(1.0 - rare) * (1.0 - rare).log2() - rare * (rare / 2.0).log2();
        assert!((entropy_of_sum(rare) / exact - 1.0).abs() < 0.01);
        assert!((entropy_of_sum(29.99) / entropy_of_sum(30.01) - 1.0).abs() < 0.01);
        assert!(entropy_of_sum(1.0) < 40.0 * entropy_of_sum(0.01));
    }
}
