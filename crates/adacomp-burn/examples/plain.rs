//! A plain Burn training loop.

mod common;

use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::Device;
use common::{Model, samples};

fn main() {
    let device = Device::flex().autodiff();
    let model = Model::new(&device);
    train(model, &device);
}

fn train(mut model: Model, device: &Device) {
    let mut optimizer = SgdConfig::new().init();
    let share = 0..128;
    for step in 0..500 {
        let loss = model.loss(samples(step, share.clone(), device));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.5, model, gradients);
        if step % 100 == 99 {
            println!("step {step}: loss {:.4}", loss.into_scalar::<f32>());
        }
    }
}
