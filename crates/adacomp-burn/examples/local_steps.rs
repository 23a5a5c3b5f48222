//! The same loop with four learners that train alone, and exchange how far their weights have moved in every tenth step.

mod common;

use adacomp_burn::{Learners, LocalLearners, LocalSteps, adacomp::Policy, adacomp_exchange::*};
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
    let learners = Learners::new(four, &model, &Policy::adacomp(), Strategy::Gather).unwrap();
    let mut learners = LocalLearners::new(learners, &model, LocalSteps::every(10)).unwrap();
    for step in 0..500 {
        let loss = model.loss(samples(step, share.clone(), device));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.5, model, gradients);
        model = learners.after_step(model).unwrap();
        if step % 100 == 99 {
            println!("step {step}: loss {:.4}", loss.into_scalar::<f32>());
        }
    }
}
