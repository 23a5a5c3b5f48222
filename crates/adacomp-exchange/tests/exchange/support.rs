//! A small model, its gradients, and what learners end up with.

use crate::draw::gradient;
use adacomp::{Gradient, Kind, Layout, Parameter, Policy, Treatment};
use adacomp_exchange::{Exchange, Local, Options, Protocol, Strategy, local};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn model() -> Arc<Layout> {
    model_with(Policy::adacomp())
}

pub(crate) fn model_with(policy: Policy) -> Arc<Layout> {
    let parameters = [
        Parameter::new("conv.weight", &[16, 8, 3, 3]),
        Parameter::new("conv.bias", &[16]),
        Parameter::new("fc.weight", &[40, 60]),
        Parameter::new("fc.bias", &[40]),
        Parameter::new("empty", &[0, 3]),
    ];
    let policy = policy.for_kind(Kind::Matrix, Treatment::Bins(100));
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
    let options = options.into();
    std::thread::scope(|scope| {
        let threads: Vec<_> = local(learners, threads, LIMIT)
            .into_iter()
            .map(|transport| scope.spawn(move || run_thread(transport, steps, options)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread that ends well")).collect()
    })
}

fn run_thread(transport: Local, steps: u64, options: Options) -> Trace {
    use adacomp_exchange::Transport;
    let hosted = transport.hosted();
    let layout = model();
    let mut exchange = Exchange::new(transport, layout.clone(), options).expect("learners that agree");
    let mut trace = Trace::default();
    for step in 0..steps {
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
        trace.residuals.push(residuals(exchange.protocol(), learner));
    }
    trace
}

/// For each layer what a learner keeps of its own gradients, and what it keeps as an owner.
pub(crate) type Residuals = Vec<(Vec<u32>, Vec<u32>)>;

pub(crate) fn residuals(protocol: &mut Protocol, learner: usize) -> Residuals {
    let layer = |layer| {
        let own = protocol.compressor(learner).and_then(|compressor| compressor.residual(layer).map(bits));
        let owned = protocol.owner(learner).and_then(|owner| owner.residual(layer).map(bits));
        (own.unwrap_or_default(), owned.unwrap_or_default())
    };
    (0..model().len()).map(layer).collect()
}

pub(crate) const STRATEGIES: [Strategy; 4] = Strategy::ALL;
