//! The same loop with four learners on four threads, each with a quarter of the minibatch, and AdaComp between them.

mod common;

use adacomp_burn::{Learners, adacomp::Policy, adacomp_exchange::*};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::Device;
use common::{Model, samples};

fn main() {
    let device = Device::flex().autodiff();
    let model = Model::new(&device);
    Threads::new(4).run(|four| train(model.clone(), &device, four));
}

fn train(mut model: Model, device: &Device, four: Local) {
    let mut optimizer = SgdConfig::new().init();
    let share = four.hosted().start * 32..four.hosted().end * 32;
    let mut learners = Learners::new(four, &model, &Policy::adacomp(), Strategy::Gather).unwrap();
    for step in 0..500 {
        let loss = model.loss(samples(step, share.clone(), device));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = learners.average(&model, gradients).unwrap();
        model = optimizer.step(0.5, model, gradients);
        if step % 100 == 99 {
            println!("step {step}: loss {:.4}", loss.into_scalar::<f32>());
        }
    }
}

#[test]
fn it_runs() {
    main();
}
