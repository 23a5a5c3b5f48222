//! A small model, its gradients, and what learners end up with.

use crate::draw::gradient;
use adacomp::Compressor;
use adacomp::{Gradient, Kind, Layout, Parameter, Policy, Treatment};
use adacomp_exchange::internal::ByHand;
use adacomp_exchange::{Exchange, Local, Options, Strategy, Threads, Transport};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) fn model() -> Arc<Layout> {
    model_with(Policy::adacomp())
}

pub(crate) fn model_with(policy: Policy) -> Arc<Layout> {
    layout(policy.for_kind(Kind::Matrix, Treatment::Bins(100)))
}

pub(crate) fn model_with_matrices_of(bin: u32) -> Arc<Layout> {
    layout(Policy::adacomp().for_kind(Kind::Matrix, Treatment::Bins(bin)))
}

fn layout(policy: Policy) -> Arc<Layout> {
    let parameters = [
        Parameter::new("conv.weight", &[16, 8, 3, 3]),
        Parameter::new("conv.bias", &[16]),
        Parameter::new("fc.weight", &[40, 60]),
        Parameter::new("fc.bias", &[40]),
        Parameter::new("empty", &[0, 3]),
    ];
    Arc::new(policy.layout(parameters).expect("a valid layout"))
}

/// The gradients of all layers.
pub(crate) fn gradients(layout: &Layout, learner: usize, step: u64) -> Vec<Vec<f32>> {
    let layers = layout.layers().iter().enumerate();
    layers.map(|(layer, parameter)| gradient(learner, step, layer, parameter.elements())).collect()
}

/// As one hosted learner gives them.
pub(crate) fn given(gradients: &[Vec<f32>]) -> Vec<Vec<Gradient<'_>>> {
    vec![gradients.iter().map(|gradient| gradient.as_slice().into()).collect()]
}

pub(crate) fn output(layout: &Layout) -> Vec<Vec<f32>> {
    layout.layers().iter().map(|layer| vec![7.0; layer.elements()]).collect()
}

pub(crate) fn slices(output: &mut [Vec<f32>]) -> Vec<&mut [f32]> {
    output.iter_mut().map(Vec::as_mut_slice).collect()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// What a run ends with: the averaged gradients of every step, and every learner's residuals.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Trace {
    pub(crate) averages: Vec<Vec<u32>>,
    pub(crate) residuals: Vec<Residuals>,
}

/// Runs a number of steps on threads; the trace of each thread, in order.
pub(crate) fn run(learners: usize, threads: usize, steps: u64, options: impl Into<Options>) -> Vec<Trace> {
    run_in_groups(learners, threads, steps, options, usize::MAX)
}

/// The same with layers in groups of at least this many elements.
pub(crate) fn run_in_groups(
    learners: usize,
    threads: usize,
    steps: u64,
    options: impl Into<Options>,
    group: usize,
) -> Vec<Trace> {
    let options = options.into();
    Threads { learners, threads, timeout: TIMEOUT }
        .run(|transport| run_thread(transport, steps, options, group))
}

/// Begins groups of consecutive layers, from the last to the first, of at least this many elements.
pub(crate) fn begin_groups(exchange: &mut Exchange<Local>, elements: usize) {
    let layout = model();
    let (mut groups, mut size) = (Vec::new(), usize::MAX);
    for layer in (0..layout.len()).rev() {
        if size >= elements {
            groups.push(Vec::new());
            size = 0;
        }
        groups.last_mut().expect("a group").insert(0, layer);
        size += layout[layer].elements();
    }
    groups.iter().for_each(|layers| assert!(exchange.begin_group(layers).is_ok()));
}

fn run_thread(transport: Local, steps: u64, options: Options, group: usize) -> Trace {
    let hosted = transport.hosted();
    let layout = model();
    let mut exchange = Exchange::new(transport, layout.clone(), options).expect("learners that agree");
    let mut trace = Trace::default();
    for step in 0..steps {
        if group != usize::MAX {
            begin_groups(&mut exchange, group);
        }
        for learner in hosted.clone() {
            for (layer, parameter) in layout.layers().iter().enumerate().rev() {
                let gradient = gradient(learner, step, layer, parameter.elements());
                exchange.submit(learner, layer, gradient.as_slice().into()).expect("a valid gradient");
            }
        }
        let mut output = output(&layout);
        let outcome = exchange.finish(&mut slices(&mut output)).expect("a step");
        assert_eq!(outcome, adacomp::Outcome::Averaged);
        trace.averages.push(output.iter().flat_map(|layer| bits(layer)).collect());
    }
    for learner in hosted {
        trace.residuals.push(residuals(&mut exchange, learner));
    }
    trace
}

/// For each layer what a learner keeps of its own gradients, and what it keeps as an owner.
pub(crate) type Residuals = Vec<(Vec<u32>, Vec<u32>)>;

/// Learners, over a transport or by hand.
pub(crate) trait Learners {
    fn compressor(&mut self, learner: usize) -> Option<&mut Compressor>;
    fn owner(&mut self, learner: usize) -> Option<&mut Compressor>;
}

impl Learners for Exchange<Local> {
    fn compressor(&mut self, learner: usize) -> Option<&mut Compressor> {
        Exchange::compressor(self, learner)
    }

    fn owner(&mut self, learner: usize) -> Option<&mut Compressor> {
        Exchange::owner(self, learner)
    }
}

impl Learners for ByHand {
    fn compressor(&mut self, learner: usize) -> Option<&mut Compressor> {
        ByHand::compressor(self, learner)
    }

    fn owner(&mut self, learner: usize) -> Option<&mut Compressor> {
        ByHand::owner(self, learner)
    }
}

pub(crate) fn residuals(learners: &mut impl Learners, learner: usize) -> Residuals {
    let layer = |layer| {
        let own = learners.compressor(learner).and_then(|compressor| compressor.residual(layer).map(bits));
        let owned = learners.owner(learner).and_then(|owner| owner.residual(layer).map(bits));
        (own.unwrap_or_default(), owned.unwrap_or_default())
    };
    (0..model().len()).map(layer).collect()
}

pub(crate) const STRATEGIES: [Strategy; 4] = Strategy::ALL;
