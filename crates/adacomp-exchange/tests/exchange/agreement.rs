//! Learners that were started differently are told before the first step.

use crate::support::{TIMEOUT, model, model_with};
use adacomp::{Codec, Kind, Layout, Parameter, Policy, Scale, Treatment};
use adacomp_exchange::{Exchange, ExchangeError, Local, Options, Strategy, Threads};
use std::sync::Arc;

/// What both learners are told when the second is started with this.
fn told(layout: Arc<Layout>, options: Options) -> Vec<String> {
    let starts = [(model(), Options::from(Strategy::Gather)), (layout, options)];
    std::thread::scope(|scope| {
        let threads: Vec<_> = Threads { timeout: TIMEOUT, ..Threads::new(2) }
            .connect()
            .into_iter()
            .zip(starts)
            .map(|(transport, (layout, options))| {
                scope.spawn(move || match Exchange::new(transport, layout, options) {
                    Ok(_) => String::new(),
                    Err(error @ ExchangeError::Disagreement { learner: 1, .. }) => error.to_string(),
                    Err(error) => panic!("{error}"),
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_difference_is_named_on_every_learner() {
    let gather = Options::from(Strategy::Gather);
    assert_eq!(told(model(), gather), ["", ""]);
    let other_model = Policy::adacomp().layout([Parameter::new("conv.weight", &[16, 8, 3, 3])]).unwrap();
    let renamed = {
        let mut layers = model().layers().to_vec();
        layers[2].parameter.name = "head.weight".to_owned();
        Layout::new(layers, 2.0, Scale::Mean).unwrap()
    };
    let cases: [(Arc<Layout>, Options, &str); 9] = [
        (
            model(),
            Options { strategy: Strategy::Reduce, ..gather },
            "strategy is reduce, but gather on learner 0",
        ),
        (model(), Options { codec: Codec::Paper, ..gather }, "codec is paper, but rice"),
        (model(), Options { owner_divisor: 2.try_into().unwrap(), ..gather }, "divisor of owners' bins is 2"),
        (model(), Options { clip: Some(2.5), ..gather }, "clip is 2.5, but none"),
        (model_with(Policy::adacomp().scale(Scale::Clamped)), gather, "scale is clamped, but mean"),
        (model_with(Policy::local_selection()), gather, "soft-threshold factor is 1, but 2"),
        (
            model_with(Policy::adacomp().for_kind(Kind::Conv, Treatment::Bins(64))),
            gather,
            "parameter 0 is `conv.weight` [16, 8, 3, 3], bins of 64, but `conv.weight` [16, 8, 3, 3], bins of 50",
        ),
        (Arc::new(other_model), gather, "number of parameters is 1, but 5"),
        (Arc::new(renamed), gather, "parameter 2 is `head.weight` [40, 60], bins of 100, but `fc.weight`"),
    ];
    for (layout, options, expected) in cases {
        let told = told(layout, options);
        assert_eq!(told[0], told[1]);
        assert!(told[0].contains(expected), "{:?} in {:?}", expected, told[0]);
        assert!(told[0].starts_with("learner 1 does not fit learner 0"));
    }
}

#[test]
fn top_k_needs_gather() {
    for strategy in [Strategy::Reduce, Strategy::Sharded] {
        let transport = Local::alone(1);
        let layout = Policy::top_k(1.0).layout([Parameter::new("fc.weight", &[40, 60])]).unwrap();
        let error = Exchange::new(transport, layout, strategy).err().expect("an error");
        assert!(matches!(error, ExchangeError::Treatment { .. }));
    }
}
