//! Learners with real Burn models.

use adacomp_burn::adacomp::{Gradient, Kind, Outcome, Policy};
use adacomp_burn::adacomp_exchange::{Local, Strategy, Threads, Transport};
use adacomp_burn::{
    Error, Learners, LocalLearners, LocalSteps, Values, parameters, set_statistics, statistics,
    take_gradients, unshared, untrained, weights,
};
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};

#[derive(Module, Debug)]
struct Net {
    convolution: Conv2d,
    norm: BatchNorm,
    blocks: Vec<Linear>,
    unused: Embedding,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            convolution: Conv2dConfig::new([1, 8], [5, 5]).init(device),
            norm: BatchNormConfig::new(8).init(device),
            blocks: vec![LinearConfig::new(8 * 16, 64).init(device), LinearConfig::new(64, 4).init(device)],
            unused: EmbeddingConfig::new(4, 4).init(device),
        }
    }

    fn loss(&self, input: Tensor<4>) -> Tensor<1> {
        let values: Tensor<2> = self.norm.forward(self.convolution.forward(input)).flatten(1, 3);
        let outputs = self.blocks.iter().fold(values, |values, block| block.forward(values).tanh());
        (outputs - 0.5).powf_scalar(2.0).mean()
    }
}

fn device() -> Device {
    Device::flex().autodiff()
}

/// What is averaged is the same only if all begin alike.
#[test]
fn learners_with_other_weights_are_told() {
    let device = device();
    let models: Vec<Linear> = (0..2).map(|_| LinearConfig::new(4, 4).init(&device)).collect();
    for error in with_learners(2, |transport, learner| {
        Learners::new(transport, &models[learner], &Policy::adacomp(), Strategy::Gather).err()
    }) {
        assert!(matches!(error, Some(Error::Weights { learner: 1 })), "{error:?}");
    }
}

/// Pictures of 8x8 that are other ones for each number.
fn pictures(numbers: std::ops::Range<usize>) -> Tensor<4> {
    let values: Vec<f32> =
        numbers.clone().flat_map(|n| (0..64).map(move |i| ((n * 97 + i * 31) % 61) as f32 / 61.0)).collect();
    Tensor::from_data(TensorData::new(values, [numbers.len(), 1, 8, 8]), &device())
}

fn gradients(model: &Net, input: Tensor<4>) -> GradientsParams {
    GradientsParams::from_grads(model.loss(input).backward(), model)
}

/// Runs this for each of the learners, each on a thread of its own.
fn with_learners<T: Send>(learners: usize, work: impl Fn(Local, usize) -> T + Sync) -> Vec<T> {
    Threads::new(learners).run(|transport| {
        let learner = transport.hosted().start;
        work(transport, learner)
    })
}

#[test]
fn names_are_paths_and_kinds_come_from_modules() {
    let model = Net::new(&device());
    let found: Vec<_> = parameters(&model).into_iter().map(|p| (p.name, p.kind, p.shape)).collect();
    let expected = [
        ("convolution.weight", Kind::Conv, vec![8, 1, 5, 5]),
        ("convolution.bias", Kind::Vector, vec![8]),
        ("norm.gamma", Kind::Vector, vec![8]),
        ("norm.beta", Kind::Vector, vec![8]),
        ("blocks.0.weight", Kind::Matrix, vec![128, 64]),
        ("blocks.0.bias", Kind::Vector, vec![64]),
        ("blocks.1.weight", Kind::Matrix, vec![64, 4]),
        ("blocks.1.bias", Kind::Vector, vec![4]),
        ("unused.weight", Kind::Matrix, vec![4, 4]),
    ];
    let expected = expected.map(|(name, kind, shape)| (name.to_owned(), kind, shape));
    assert_eq!(found, expected);
    let rest: Vec<_> = untrained(&model).into_iter().map(|parameter| parameter.name).collect();
    assert_eq!(rest, ["norm.running_mean", "norm.running_var"]);
}

#[test]
fn a_dense_average_is_the_mean_of_all_gradients_and_unused_parameters_get_zeros() {
    let model = Net::new(&device());
    let own: Vec<Vec<Values>> = (0..3)
        .map(|learner| {
            let model = unshared(model.clone());
            take_gradients(&model, gradients(&model, pictures(learner * 4..learner * 4 + 4))).unwrap()
        })
        .collect();
    let averages = with_learners(3, |transport, learner| {
        let model = unshared(model.clone());
        let mut learners = Learners::new(transport, &model, &Policy::dense(), Strategy::Dense).unwrap();
        let own = gradients(&model, pictures(learner * 4..learner * 4 + 4));
        let averaged = learners.average(&model, own).unwrap();
        take_gradients(&model, averaged).unwrap()
    });
    for average in averages {
        assert_eq!(average.len(), 9);
        for (layer, values) in average.iter().enumerate() {
            for (element, value) in numbers(values).iter().enumerate() {
                let mean = own.iter().map(|own| f64::from(numbers(&own[layer])[element])).sum::<f64>() / 3.0;
                assert!((f64::from(*value) - mean).abs() <= 1e-7 + 1e-6 * mean.abs());
            }
        }
        assert!(numbers(&average[8]).iter().all(|value| *value == 0.0), "the unused embedding");
        assert!(numbers(&average[0]).iter().any(|value| *value != 0.0));
    }
}

fn numbers(values: &Values) -> &[f32] {
    match values.as_gradient() {
        Gradient::F32(values) => values,
        other => panic!("{other:?}"),
    }
}

fn train(
    transport: Local,
    learner: usize,
    mut model: Net,
    mut optimizer: ModuleOptimizer,
    strategy: Strategy,
) -> Vec<Vec<f32>> {
    let mut learners =
        Learners::new(transport, &model, &Policy::adacomp().min_elements(0), strategy).unwrap();
    for step in 0..6 {
        let own = gradients(&model, pictures(step * 100 + learner * 4..step * 100 + learner * 4 + 4));
        let averaged = learners.average(&model, own).unwrap();
        assert_eq!(learners.outcome(), Outcome::Averaged);
        model = optimizer.step(0.05, model, averaged);
    }
    weights(&model).unwrap()
}

#[test]
fn replicas_stay_equal_to_the_bit_with_burns_optimisers() {
    let model = Net::new(&device());
    let before = weights(&model).unwrap();
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    for strategy in [Strategy::Gather, Strategy::Reduce, Strategy::Sharded] {
        for optimizer in [momentum.init(), AdamConfig::new().init()] {
            let all = with_learners(4, |transport, learner| {
                train(transport, learner, unshared(model.clone()), optimizer.clone(), strategy)
            });
            assert!(all.iter().all(|weights| *weights == all[0]), "{strategy:?}");
            assert_ne!(all[0], before);
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing_on_any_learner() {
    let model = Net::new(&device());
    let before = weights(&model).unwrap();
    let ends = with_learners(2, |transport, learner| {
        let mut model = unshared(model.clone());
        let mut learners = Learners::new(transport, &model, &Policy::adacomp(), Strategy::Gather).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let input = if learner == 1 { pictures(0..4) * f32::NAN } else { pictures(0..4) };
        let averaged = learners.average(&model, gradients(&model, input)).unwrap();
        let (outcome, given) = (learners.outcome(), averaged.len());
        model = optimizer.step(0.1, model, averaged);
        let after_bad = weights(&model).unwrap();
        let averaged = learners.average(&model, gradients(&unshared(model.clone()), pictures(0..4))).unwrap();
        (outcome, given, after_bad, learners.outcome(), averaged.len())
    });
    for (outcome, given, after_bad, next, next_given) in ends {
        assert_eq!((outcome, given), (Outcome::NonFinite { learner: 1 }, 0));
        assert_eq!(after_bad, before);
        assert_eq!((next, next_given), (Outcome::Averaged, 9));
    }
}

#[test]
fn statistics_are_each_learners_own_until_they_are_averaged() {
    let model = Net::new(&device());
    let all = with_learners(3, |transport, learner| {
        let model = unshared(model.clone());
        model.loss(pictures(learner * 50..learner * 50 + 4));
        let own = statistics(&model).unwrap();
        let mut learners = Learners::new(transport, &model, &Policy::dense(), Strategy::Dense).unwrap();
        let averaged = learners.average_statistics(&model).unwrap();
        assert_eq!(statistics(&model).unwrap(), own, "training goes on with the learner's own");
        (own, statistics(&averaged).unwrap())
    });
    assert_ne!(all[0].0, all[1].0);
    for (_, averaged) in &all {
        for (tensor, values) in averaged.iter().enumerate() {
            for (element, value) in values.iter().enumerate() {
                let mean = all.iter().map(|(own, _)| f64::from(own[tensor][element])).sum::<f64>() / 3.0;
                assert_eq!(*value, mean as f32);
            }
        }
    }
    // What all have in common stays as it is, also where sums of three round.
    let common = vec![vec![0.1f32, 1e-30, 3.3], vec![7.7; 2]];
    let averaged = with_learners(3, |mut transport, _| {
        adacomp_burn::average_statistics(&mut transport, std::slice::from_ref(&common)).unwrap()
    });
    assert!(averaged.iter().all(|averaged| *averaged == common));
}

/// Trains with local steps, and returns what the learner and all learners end with.
fn train_locally(
    transport: Local,
    learner: usize,
    mut model: Net,
    steps: LocalSteps,
    policy: &Policy,
) -> [Vec<Vec<f32>>; 3] {
    let learners = Learners::new(transport, &model, policy, Strategy::Gather).unwrap();
    let mut learners = LocalLearners::new(learners, &model, steps).unwrap();
    let mut optimizer = SgdConfig::new().init();
    for step in 0..7 {
        let own = gradients(&model, pictures(step * 100 + learner * 4..step * 100 + learner * 4 + 4));
        model = learners.after_step(optimizer.step(0.05, model, own)).unwrap();
    }
    let shared = learners.shared_model(model.clone());
    [weights(&model).unwrap(), weights(&shared).unwrap(), statistics(&shared).unwrap()]
}

#[test]
fn learners_with_local_steps_part_and_meet_again() {
    let model = Net::new(&device());
    let policy = Policy::adacomp().min_elements(0);
    for (steps, meet) in [
        (LocalSteps::every(1), true),
        (LocalSteps::every(7), true),
        (LocalSteps { rate: 0.7, momentum: 0.9, residual_decay: 0.95, ..LocalSteps::every(3) }, false),
    ] {
        let all = with_learners(3, |transport, learner| {
            train_locally(transport, learner, unshared(model.clone()), steps, &policy)
        });
        for [local, shared, statistics] in &all {
            assert_eq!([shared, statistics], [&all[0][1], &all[0][2]], "{steps:?}");
            assert_eq!(local == shared, meet, "{steps:?}");
        }
        assert_ne!(all[0][1], weights(&model).unwrap());
    }
}

/// The rule, computed once more here, for one learner that sends all it has: its moves are its own steps.
#[test]
fn momentum_follows_the_rule() {
    let model = LinearConfig::new(4, 3).init(&device());
    let steps = LocalSteps { rate: 0.7, momentum: 0.9, ..LocalSteps::every(1) };
    let learners = Learners::new(Local::alone(1), &model, &Policy::dense(), Strategy::Dense).unwrap();
    let mut learners = LocalLearners::new(learners, &model, steps).unwrap();
    let (mut optimizer, mut model) = (SgdConfig::new().init(), model);
    let mut shared = weights(&model).unwrap();
    let mut velocity: Vec<Vec<f32>> = shared.iter().map(|layer| vec![0.0; layer.len()]).collect();
    for step in 0..3 {
        let input = Tensor::<2>::ones([2, 4], &device()) * (1.0 + step as f32);
        let own =
            GradientsParams::from_grads(model.forward(input).powf_scalar(2.0).mean().backward(), &model);
        let local = optimizer.step(0.1, model, own);
        let moved = weights(&local).unwrap();
        for ((shared, local), velocity) in shared.iter_mut().zip(&moved).zip(&mut velocity) {
            for ((shared, local), velocity) in shared.iter_mut().zip(local).zip(velocity) {
                let average = *shared - local;
                *velocity = 0.9 * *velocity + average;
                *shared -= 0.7 * (average + 0.9 * *velocity);
            }
        }
        model = learners.after_step(local).unwrap();
        assert_eq!(weights(&model).unwrap(), shared);
    }
}

/// Training that was saved goes on to the same weights, momentum included, and the last steps count where several are hosted.
#[test]
fn local_steps_with_momentum_go_on_from_what_was_saved() {
    let options = LocalSteps { rate: 0.7, momentum: 0.9, ..LocalSteps::every(3) };
    let connect = |model: &Net| {
        let learners = Learners::new(Local::alone(2), model, &Policy::dense(), Strategy::Dense).unwrap();
        LocalLearners::new(learners, model, options).unwrap()
    };
    let train = |learners: &mut LocalLearners<Local>, mut models: Vec<Net>, steps: std::ops::Range<usize>| {
        for step in steps {
            let each = models.into_iter().enumerate().map(|(learner, model)| {
                let own = gradients(&model, pictures(step * 100 + learner * 4..step * 100 + learner * 4 + 4));
                SgdConfig::new().init().step(0.05, model, own)
            });
            models = learners.after_step_hosted(each.collect()).unwrap();
        }
        models
    };
    let model = Net::new(&device());
    let two = |model: &Net| vec![unshared(model.clone()), unshared(model.clone())];
    let mut learners = connect(&model);
    let models = train(&mut learners, two(&model), 0..3);
    let (saved, velocity) = (models[0].clone(), learners.shared().velocity.clone());
    let models = train(&mut learners, models, 3..8);
    assert!(matches!(learners.exchange(models[0].clone()), Err(Error::Hosted { hosted: 2, given: 1 })));
    let expected = learners.exchange_hosted(models).unwrap();
    assert_eq!(weights(&expected[0]).unwrap(), learners.shared().weights);
    assert_eq!(weights(&expected[0]).unwrap(), weights(&expected[1]).unwrap());

    let mut learners = connect(&saved);
    learners.shared().velocity = velocity;
    let models = train(&mut learners, two(&saved), 3..8);
    let actual = learners.exchange_hosted(models).unwrap();
    assert_eq!(weights(&actual[0]).unwrap(), weights(&expected[0]).unwrap());
}

/// Also if only what local steps begin with differs, such as a checkpoint that one learner has loaded.
#[test]
fn local_steps_with_other_weights_are_told() {
    let device = device();
    let models: Vec<Linear> = (0..2).map(|_| LinearConfig::new(4, 4).init(&device)).collect();
    for error in with_learners(2, |transport, learner| {
        let learners = Learners::new(transport, &models[0], &Policy::adacomp(), Strategy::Gather).unwrap();
        LocalLearners::new(learners, &models[learner], LocalSteps::every(2)).err()
    }) {
        assert!(matches!(error, Some(Error::Weights { learner: 1 })), "{error:?}");
    }
}

#[test]
fn gradients_of_another_model_are_refused() {
    let (model, other) = (Net::new(&device()), Net::new(&device()));
    let mut learners = Learners::new(Local::alone(1), &model, &Policy::adacomp(), Strategy::Gather).unwrap();
    let own = gradients(&other, pictures(0..4));
    let error = learners.average(&model, own).unwrap_err();
    assert!(matches!(error, Error::Gradients { left: 8 }), "{error:?}");
    // What `unwrap` shows is the message.
    assert_eq!(format!("{error:?}"), error.to_string());
}

#[test]
fn weights_that_are_not_finite_bring_all_learners_back_to_the_shared_ones() {
    let model = Net::new(&device());
    let before = (weights(&model).unwrap(), statistics(&model).unwrap());
    let ends = with_learners(2, |transport, learner| {
        let mut model = unshared(model.clone());
        let learners = Learners::new(transport, &model, &Policy::adacomp(), Strategy::Gather).unwrap();
        let mut learners = LocalLearners::new(learners, &model, LocalSteps::every(2)).unwrap();
        for step in 0..4 {
            let bad = step == 1 && learner == 1;
            let input = if bad { pictures(0..4) * f32::NAN } else { pictures(learner..learner + 4) };
            let own = gradients(&model, input);
            model = learners.after_step(SgdConfig::new().init().step(0.1, model, own)).unwrap();
            if step == 1 {
                assert_eq!(learners.outcome(), Outcome::NonFinite { learner: 1 });
                assert_eq!((weights(&model).unwrap(), statistics(&model).unwrap()), before);
            }
        }
        assert_eq!(learners.outcome(), Outcome::Averaged);
        weights(&model).unwrap()
    });
    assert!(ends[0] == ends[1] && ends[0] != before.0);
    assert!(ends[0].iter().flatten().all(|weight| weight.is_finite()));
}

#[test]
fn local_steps_that_differ_or_make_no_sense_are_refused() {
    let model = LinearConfig::new(2, 2).init(&device());
    let connect = |transport, steps| {
        let learners = Learners::new(transport, &model, &Policy::dense(), Strategy::Dense).unwrap();
        LocalLearners::new(learners, &model, steps).err().map(|error| error.to_string())
    };
    let errors =
        with_learners(2, |transport, learner| connect(transport, LocalSteps::every(5 + learner as u64)));
    for error in errors {
        let error = error.unwrap();
        assert!(
            error.contains("learner 1 does not fit learner 0: local steps is 6, but 5 on learner 0"),
            "{error}"
        );
    }
    let good = LocalSteps::every(3);
    for (steps, message) in [
        (LocalSteps::every(0), "steps from one exchange to the next of 0: choose 1 or more"),
        (LocalSteps { rate: 0.0, ..good }, "an outer rate of 0: choose a number above 0"),
        (LocalSteps { momentum: 1.0, ..good }, "an outer momentum of 1: choose 0 or more, and below 1"),
        (
            LocalSteps { residual_decay: f32::NAN, ..good },
            "a residual decay of NaN: choose a number from 0 to 1",
        ),
    ] {
        assert_eq!(connect(Local::alone(1), steps).as_deref(), Some(message));
    }
}

#[test]
fn clones_share_running_statistics_until_they_are_unshared() {
    let model = Net::new(&device());
    let before = statistics(&model).unwrap();
    let (sharing, own) = (model.clone(), unshared(model.clone()));
    own.loss(pictures(0..4));
    assert_eq!(statistics(&model).unwrap(), before);
    sharing.loss(pictures(0..4));
    assert_ne!(statistics(&model).unwrap(), before);
    let set = set_statistics(model, &before);
    assert_eq!(statistics(&set).unwrap(), before);
}

#[test]
fn what_is_wrong_is_said() {
    let model = Net::new(&device());
    let error = Learners::new(Local::alone(1), &model.valid(), &Policy::dense(), Strategy::Dense);
    assert!(matches!(error.err(), Some(Error::NothingTrained)));
    let frozen = model.clone().no_grad();
    let error = Learners::new(Local::alone(1), &frozen, &Policy::dense(), Strategy::Dense);
    assert!(matches!(error.err(), Some(Error::NothingTrained)));
    let mut learners = Learners::new(Local::alone(1), &model, &Policy::dense(), Strategy::Dense).unwrap();
    let error = learners.average(&frozen, GradientsParams::new()).unwrap_err();
    assert!(matches!(error, Error::Parameters { expected: 9, actual: 0 }), "{error}");
    let error = learners.average_hosted(&model, Vec::new()).unwrap_err();
    assert!(matches!(error, Error::Hosted { hosted: 1, given: 0 }), "{error}");
}

#[test]
fn half_precision_gradients_are_taken_as_they_are() {
    let model = LinearConfig::new(2, 2).with_bias(false).init(&device());
    let id = model.weight.id;
    let half = |dtype| {
        let mut gradients = GradientsParams::new();
        let data = TensorData::new(vec![1.0f32, -0.5, 0.25, 2.0], [2, 2]);
        gradients.register(id, Tensor::<2>::from_data(data, (&Device::flex(), dtype)));
        let mut learners = Learners::new(Local::alone(1), &model, &Policy::dense(), Strategy::Dense).unwrap();
        let averaged = learners.average(&model, gradients).unwrap().remove::<2>(id).unwrap();
        assert_eq!(averaged.dtype(), DType::F32, "the parameter's type");
        averaged.into_data().try_into_vec::<f32>().unwrap()
    };
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        assert_eq!(half(dtype), [1.0, -0.5, 0.25, 2.0]);
    }
}

#[test]
fn the_examples_differ_in_fewer_than_ten_lines() {
    let lines = |text: &'static str| {
        let code = text.lines().map(str::trim).filter(|line| !line.starts_with("//!") && !line.is_empty());
        code.collect::<Vec<_>>()
    };
    let plain = lines(include_str!("../examples/plain.rs"));
    for (example, call) in [
        (include_str!("../examples/data_parallel.rs"), "learners.average"),
        (include_str!("../examples/local_steps.rs"), "learners.after_step"),
    ] {
        let new: Vec<_> = lines(example).into_iter().filter(|line| !plain.contains(line)).collect();
        assert!(new.len() < 10, "{} lines: {new:#?}", new.len());
        assert!(new.iter().any(|line| line.contains(call)));
    }
}
