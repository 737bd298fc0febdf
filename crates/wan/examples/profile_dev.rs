use burn::tensor::*;
use wan::transformer::*;
use wan::text::PromptEmbeds;
use wan::weights::Weights;
use std::time::Instant;

fn main(){
    let d = Device::flex();
    let cfg = TransformerConfig{patch_size:[1,2,2],num_attention_heads:6,attention_head_dim:32,in_channels:16,out_channels:16,text_dim:128,freq_dim:256,ffn_dim:768,num_layers:6,cross_attn_norm:true,qk_norm:Some("rms_norm_across_heads".into()),eps:1e-6,image_dim:None,added_kv_proj_dim:None,rope_max_seq_len:1024};
    let m = WanTransformer::new(cfg, Weights::random(1,&d), DType::F32).unwrap();
    let b=16; let n=|k:usize|{grpo::Key{seed:1,iteration:0,prompt:0,rollout:0,purpose:grpo::Purpose::Data}.normals(k)};
    let x: Tensor<5> = Tensor::from_data(TensorData::new(n(b*16*5*64),[b,16,5,8,8]),&d);
    let rows=12; let e: Tensor<3> = Tensor::from_data(TensorData::new(n(b*rows*128),[b,rows,128]),&d);
    let text = PromptEmbeds{embeds:e,lengths:vec![rows;b],padded_length:512};
    let mode=std::env::args().nth(1).unwrap();
    let reps:usize=std::env::args().nth(2).unwrap().parse().unwrap();
    let lora = wan::lora::Lora::attach(&m.linears,&wan::lora::LoraConfig{rank:4,alpha:8.0,target_modules:["to_q","to_k","to_v","to_out.0"].map(str::to_owned).to_vec(),init:Default::default()},0,&d).unwrap();
    lora.params.set_trainable(true);
    let ctx=m.text_context(&text,false);
    for i in 0..reps{
        let t=Instant::now();
        match mode.as_str(){
            "fwd"=>{ let v=m.forward(x.clone(),&vec![500.0;b],&ctx); let _=v.into_data(); }
            "train"=>{ let c=m.text_context(&text,true); let v=m.forward(x.clone().autodiff(),&vec![500.0;b],&c); let _g=v.powi_scalar(2).mean().backward(); }
            "full"=>{ if i==0 {m.params.set_trainable(true);} let c=m.text_context(&text,true); let v=m.forward(x.clone().autodiff(),&vec![500.0;b],&c); let _g=v.powi_scalar(2).mean().backward(); }
            _=>panic!()
        }
        println!("{:?}",t.elapsed());
    }
}
